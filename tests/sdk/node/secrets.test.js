// Secrets are written, listed without values, changed and removed by the unmodified package.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import { Secret, SecretNotFoundError } from 'e2b'
import { create, limit } from './support.js'

test('a secret is created, changed and destroyed', limit, async (t) => {
  const name = `token-${randomUUID().slice(0, 8)}`
  const created = await Secret.create(name, 'first value', { metadata: { team: 'a' } })
  t.after(() => Secret.destroy(name))
  assert.equal(created.name, name)
  assert.equal(created.version, 1)
  assert.deepEqual(created.metadata, { team: 'a' })
  const changed = await Secret.update(name, 'second value')
  assert.equal(changed.version, 2)
  const names = []
  const pages = Secret.list({ limit: 1 })
  while (pages.hasNext) names.push(...(await pages.nextItems()).map((secret) => secret.name))
  assert.ok(names.includes(name))
  assert.ok(!JSON.stringify(await Secret.getInfo(created.secretId)).includes('value'))
  assert.equal(await Secret.destroy(name), true)
  assert.equal(await Secret.exists(name), false)
  await assert.rejects(Secret.update(name, 'x'), SecretNotFoundError)
})

test('rules add headers with secrets that are not returned', limit, async (t) => {
  const name = `token-${randomUUID().slice(0, 8)}`
  await Secret.create(name, 'the value')
  t.after(() => Secret.destroy(name))
  const rules = (secret) => {
    const headers = { authorization: `Bearer \${e2b.secrets.${secret}}` }
    return { 'api.example.com': [{ transform: { headers } }] }
  }
  const literal = { 'b.example.com': [{ transform: { headers: { 'x-key': 'text' } } }] }
  const sandbox = await create(t, 'base', { network: { rules: { ...rules(name), ...literal } } })
  const masked = { 'b.example.com': [{ transform: { headers: { 'x-key': '***' } } }] }
  assert.deepEqual((await sandbox.getInfo()).network.rules, { ...rules(name), ...masked })
  await sandbox.updateNetwork({ rules: rules(name) })
  assert.deepEqual((await sandbox.getInfo()).network.rules, rules(name))
  await assert.rejects(sandbox.updateNetwork({ rules: rules('missing') }), /does not exist/)
})
