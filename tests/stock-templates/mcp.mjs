// Starts a sandbox with MCP servers by the SDK for JavaScript, and uses their tools with the official client.
import assert from 'node:assert/strict'
import { Sandbox } from 'e2b'
import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client'

const sandbox = await Sandbox.create({ timeoutMs: 600_000, requestTimeoutMs: 300_000, mcp: { time: {}, filesystem: { paths: ['/srv'] } } })
try {
  await sandbox.files.write('/srv/greeting', 'hello', { user: 'root' })
  const headers = { authorization: `Bearer ${await sandbox.getMcpToken()}` }
  const client = new Client({ name: 'test', version: '1' })
  await client.connect(new StreamableHTTPClientTransport(new URL(sandbox.getMcpUrl()), { requestInit: { headers } }))
  const { tools } = await client.listTools()
  const names = tools.map((tool) => tool.name)
  assert(names.includes('get_current_time') && names.includes('read_text_file'), names.join())
  const read = await client.callTool({ name: 'read_text_file', arguments: { path: '/srv/greeting' } })
  assert.equal(read.content[0].text, 'hello')
  await client.close()
  console.log('used', names.length, 'tools')
} finally {
  await sandbox.kill()
}
