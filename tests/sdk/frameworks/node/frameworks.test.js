// The AI SDK with `@e2b/code-interpreter`, and `@mastra/e2b`, unmodified.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Sandbox as CodeInterpreter } from '@e2b/code-interpreter'
import { Agent } from '@mastra/core/agent'
import { Workspace } from '@mastra/core/workspace'
import { E2BSandbox } from '@mastra/e2b'
import { generateText, stepCountIs, tool } from 'ai'
import { Sandbox } from 'e2b'
import { z } from 'zod'
import { startModel } from './model.js'

test('a tool of the AI SDK runs code and commands in a sandbox', async () => {
  const model = await startModel([['run', { code: 'x = 6' }]], [['run', { code: 'print(x * 7)' }]])
  const sandbox = await CodeInterpreter.create({ timeoutMs: 120_000 })
  try {
    const run = tool({
      description: 'Runs Python',
      inputSchema: z.object({ code: z.string() }),
      execute: async ({ code }) => (await sandbox.runCode(code)).logs.stdout.join(''),
    })
    const provider = createOpenAICompatible({ name: 'local', baseURL: model.url, apiKey: 'k' })
    const result = await generateText({ model: provider('m'), tools: { run }, prompt: 'start', stopWhen: stepCountIs(5) })
    assert.equal(result.text, 'done')
    assert.match(model.results().at(-1), /42/)
  } finally {
    await sandbox.kill()
    await model.close()
  }
})

test('an agent of Mastra uses the commands of its workspace', async () => {
  const name = 'mastra_workspace_execute_command'
  const model = await startModel([[name, { command: 'echo made >made.txt; id -un' }]], [[name, { command: 'cat made.txt' }]])
  const workspace = new Workspace({ sandbox: new E2BSandbox({ template: 'base', timeout: 120_000 }) })
  await workspace.init()
  try {
    const agent = new Agent({
      id: 'worker',
      name: 'worker',
      instructions: 'Use the tools.',
      model: { id: 'local/m', url: model.url, apiKey: 'k' },
      workspace,
    })
    const result = await agent.generate('start', { maxSteps: 5 })
    assert.equal(result.text, 'done')
    assert.match(model.results()[0], /user/)
    assert.match(model.results()[1], /made/)
  } finally {
    await workspace.destroy()
    await model.close()
  }
})

test('no sandbox is left', async () => {
  assert.deepEqual(await Sandbox.list().nextItems(), [])
})
