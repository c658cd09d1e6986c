// Scripted model server on the loopback interface, with the Chat Completions API. A turn is a text, or a list of pairs
// of a tool's name and arguments.
import { createServer } from 'node:http'

export async function startModel(...turns) {
  const model = { requests: [] }
  const server = createServer(async (request, response) => {
    let body = ''
    for await (const piece of request) body += piece
    const asked = JSON.parse(body)
    model.requests.push(asked)
    const turn = turns.shift() ?? 'done'
    const number = model.requests.length
    const calls =
      typeof turn === 'string'
        ? undefined
        : turn.map(([name, input], index) => ({
            index,
            id: `call_${number}_${index}`,
            type: 'function',
            function: { name, arguments: JSON.stringify(input) },
          }))
    const message = { role: 'assistant', content: calls ? null : turn, tool_calls: calls }
    const reason = calls ? 'tool_calls' : 'stop'
    const usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 }
    const answer = { id: `c_${number}`, created: 0, model: 'm', usage }
    if (!asked.stream) {
      response.setHeader('content-type', 'application/json')
      const choices = [{ index: 0, message, finish_reason: reason }]
      return response.end(JSON.stringify({ ...answer, object: 'chat.completion', choices }))
    }
    response.setHeader('content-type', 'text/event-stream')
    for (const choice of [{ delta: message, finish_reason: null }, { delta: {}, finish_reason: reason }]) {
      const chunk = { ...answer, object: 'chat.completion.chunk', choices: [{ index: 0, ...choice }] }
      response.write(`data: ${JSON.stringify(chunk)}\n\n`)
    }
    response.end('data: [DONE]\n\n')
  })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  model.url = `http://127.0.0.1:${server.address().port}`
  model.close = () => new Promise((resolve) => server.close(resolve) && server.closeAllConnections())
  // Results of the tools in the latest request.
  model.results = () =>
    model.requests.at(-1).messages.filter((message) => message.role === 'tool').map((message) => JSON.stringify(message.content))
  return model
}
