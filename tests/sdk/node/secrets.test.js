// Secrets are written, listed without values, changed and removed by the unmodified package.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import { Secret, SecretNotFoundError } from 'e2b'
import { limit } from './support.js'

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
