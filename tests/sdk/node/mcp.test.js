// The MCP server, with the official SDK for TypeScript and the command line of the inspector.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { test } from 'node:test'
import { promisify } from 'node:util'
import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client'
import { StdioClientTransport } from '@modelcontextprotocol/client/stdio'
import { Sandbox } from 'e2b'
import { apiKey, Collected, eventually, limit, url } from './support.js'

const program = path.join(process.env.JIFFY_BIN_DIR, 'jiffy')
const env = { PATH: process.env.PATH, JIFFY_URL: url, JIFFY_API_KEY: apiKey }
const authorization = `Bearer ${apiKey}`
const transports = {
  'standard input and output': () => new StdioClientTransport({ command: program, args: ['mcp'], env }),
  HTTP: () => new StreamableHTTPClientTransport(new URL('/mcp', url), { requestInit: { headers: { authorization } } }),
}

// Returns a connected client, which is closed after the test.
async function connect(context, transport, mode) {
  const client = new Client({ name: 'suite', version: '1' }, { versionNegotiation: { mode } })
  await client.connect(transport)
  context.after(() => client.close())
  return client
}

// Calls a tool and returns its structured result, which the client has compared with the schema.
async function call(client, name, args, options) {
  const answer = await client.callTool({ name, arguments: args }, options)
  assert.ok(!answer.isError, JSON.stringify(answer.content))
  return answer.structuredContent
}

for (const [name, transport] of Object.entries(transports)) {
  for (const mode of ['legacy', 'auto']) {
    test(`over ${name}, in mode ${mode}, a failed change is rolled back`, limit, async (t) => {
      const client = await connect(t, transport(), mode)
      const { tools } = await client.listTools()
      assert.ok(tools.length >= 18 && tools.every((tool) => tool.outputSchema && tool.annotations), `${tools.length}`)
      const { sandbox } = await call(client, 'sandbox_create', { timeout_s: 300 })
      t.after(() => Sandbox.kill(sandbox))
      await call(client, 'file_write', { sandbox, path: '/home/user/a', content: 'before\n' })
      const { snapshot } = await call(client, 'snapshot', { sandbox })
      t.after(() => Sandbox.deleteSnapshot(snapshot))
      const broken = await call(client, 'sandbox_exec', { sandbox, command: 'rm /home/user/a; echo lost >&2; exit 3' })
      assert.deepEqual([broken.exit_code, broken.stderr], [3, 'lost\n'])
      await call(client, 'rollback', { sandbox, snapshot })
      const { content } = await call(client, 'file_read', { sandbox, path: '/home/user/a' })
      assert.equal(content, 'before\n')
      const uri = `jiffy://sandbox/${sandbox}/files/home/user/a`
      assert.equal((await client.readResource({ uri })).contents[0].text, 'before\n')
      const wrong = await client.callTool({ name: 'file_read', arguments: { sandbox, path: '/absent' } })
      assert.ok(wrong.isError && /\/absent/.test(wrong.content[0].text), JSON.stringify(wrong))
    })
  }

  test(`over ${name}, an aborted call reports progress and kills its command`, limit, async (t) => {
    const client = await connect(t, transport(), 'legacy')
    const { sandbox } = await call(client, 'sandbox_create', { timeout_s: 300 })
    t.after(() => Sandbox.kill(sandbox))
    const abort = new AbortController()
    const progress = new Collected()
    const running = client.callTool(
      { name: 'sandbox_exec', arguments: { sandbox, command: 'sleep 4321' } },
      { signal: abort.signal, onprogress: progress.push },
    )
    const processes = async () => (await call(client, 'sandbox_exec', { sandbox, command: 'pgrep -cx sleep || true' })).stdout.trim()
    await progress.until(() => progress.items.length > 0)
    await eventually(async () => (await processes()) === '1')
    abort.abort()
    await assert.rejects(running)
    await eventually(async () => (await processes()) === '0')
  })
}

test('the inspector accepts all schemas without a warning and calls tools over both transports', limit, async (t) => {
  // The inspector stores files in the home directory.
  const home = await mkdtemp(path.join(tmpdir(), 'jiffy-inspector-'))
  t.after(() => rm(home, { recursive: true }))
  const inspect = async (server, ...args) => {
    const options = { env: { ...env, HOME: home }, timeout: 50_000 }
    const done = await promisify(execFile)(path.resolve('node_modules/.bin/mcp-inspector'), ['--cli', ...server, ...args], options)
    assert.equal(done.stderr, '')
    return JSON.parse(done.stdout)
  }
  // The inspector passes no other variables to the server. Without an address it would start a daemon.
  const variables = Object.entries(env).flatMap(([name, value]) => ['-e', `${name}=${value}`])
  const servers = [
    [...variables, program, 'mcp'],
    [new URL('/mcp', url).href, '--transport', 'http', '--header', `Authorization: ${authorization}`],
  ]
  for (const server of servers) {
    const { tools } = await inspect(server, '--method', 'tools/list', '--strict')
    assert.ok(tools.some((tool) => tool.name === 'rollback'))
    const args = ['--method', 'tools/call', '--tool-name', 'sandbox_run', '--tool-arg', 'command=echo $((6 * 7))']
    const { structuredContent } = await inspect(server, ...args)
    assert.equal(structuredContent.command.stdout, '42\n')
  }
})
