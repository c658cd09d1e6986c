// Errors and retries.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import * as e2b from 'e2b'
import { Host, Sandbox, Snapshot, UnreachableError, errors, isApiError } from '@jiffy/sandbox'
import { scenario, unique } from './harness.js'
import { create, scripted } from './servers.js'

const CREATED = '{"templateID":"base","sandboxID":"a","clientID":"jiffy","envdVersion":"0.6.13","domain":null}'
const BUSY = '{"code":503,"message":"the host has no capacity","error_code":"host_busy"}'

scenario('every error code has a class', async () => {
  const page = readFileSync(process.env.JIFFY_TEST_ERRORS, 'utf8').split('\n## Error codes\n')[1]
  const listed = [...page.matchAll(/^- `(\w+)` \(/gm)].map((match) => match[1])
  assert(listed.length > 50)
  assert.deepEqual(Object.keys(errors.classes).sort(), listed.sort())
  const ofE2b = Object.values(e2b).filter((value) => typeof value === 'function' && value.prototype instanceof Error)
  for (const [code, Kind] of Object.entries(errors.classes)) {
    const error = new Kind('text', { status: 400 })
    assert(isApiError(error) && error.errorCode === code && ofE2b.some((base) => error instanceof base))
    assert.deepEqual([error.message, error.name], ['400: text', Kind.name])
  }
})

scenario('an error has a code and a request id', async () => {
  await assert.rejects(Sandbox.create('no-such-template'), (error) => {
    assert(error instanceof errors.TemplateNotFoundError && error instanceof e2b.NotFoundError)
    assert.deepEqual([error.status, error.errorCode], [404, 'template_not_found'])
    return error.requestId.length > 0 && error.message.includes('no-such-template')
  })
})

scenario('an unknown error code has the class of its status', async (t) => {
  for (const [status, kind] of [[429, e2b.RateLimitError], [418, e2b.SandboxError]]) {
    const body = '{"message":"m","error_code":"of_the_future"}'
    const { connection } = await scripted(t, [status, { 'Should-Retry': 'false' }, body])
    await assert.rejects(Host.status(connection), (error) =>
      error instanceof kind && error.errorCode === 'of_the_future'
    )
  }
})

scenario('a taken name is an error', async (t) => {
  const name = unique()
  await create(t, { name })
  await assert.rejects(create(t, { name }), (error) => error instanceof errors.NameTakenError && error.status === 409)
})

scenario('a create is repeated with its key', async (t) => {
  const { connection, requests } = await scripted(t, null, [504, {}, '{}'], [201, {}, CREATED])
  assert.equal((await Sandbox.create(connection)).sandboxId, 'a')
  assert.equal(requests.length, 3)
  assert.equal(new Set(requests.map(({ headers }) => headers['idempotency-key'])).size, 1)
})

scenario('an image is imported before the create', async (t) => {
  const bodies = [
    { templateID: 't', buildID: 'b' },
    {},
    { status: 'building', logs: ['layer 1 of 2\n'] },
    { status: 'ready', logs: ['layer 2 of 2\n'] },
  ]
  const answers = bodies.map((body) => [202, {}, JSON.stringify(body)])
  const { connection, requests } = await scripted(t, ...answers, [201, {}, CREATED])
  const log = []
  await Sandbox.create({ ...connection, image: 'library/Python:3.12', onImageLog: (line) => log.push(line) })
  assert.deepEqual(log, ['layer 1 of 2', 'layer 2 of 2'])
  const status = '/templates/t/builds/b/status?logsOffset='
  const paths = ['/v3/templates', '/v2/templates/t/builds/b', `${status}0`, `${status}1`, '/v2/sandboxes']
  assert.deepEqual(requests.map(({ path }) => path), paths)
})

scenario('an image that cannot be imported is an error', async () => {
  // Registries in private networks need a permission of the host's owner.
  await assert.rejects(Sandbox.create({ image: '127.0.0.1:1/absent' }), (error) =>
    error instanceof e2b.BuildError && /cannot import image 127\.0\.0\.1:1\/absent: .*127\.0\.0\.1/.test(error.message)
  )
  await assert.rejects(Sandbox.create('base', { image: 'python:3.12' }), /either template or image/)
})

scenario('retry after is the time before a retry', async (t) => {
  // A rejected fork was not executed.
  const { connection, requests } = await scripted(t, [503, { 'Retry-After': '1' }, BUSY], [201, {}, '[]'])
  const start = performance.now()
  assert.deepEqual(await Sandbox.fork('a', connection), [])
  assert(performance.now() - start >= 990 && requests.length === 2)
})

scenario('should retry false prevents a retry', async (t) => {
  const { connection, requests } = await scripted(t, [503, { 'Should-Retry': 'false' }, BUSY])
  await assert.rejects(Sandbox.create(connection), (error) =>
    error instanceof errors.HostBusyError && error instanceof e2b.ServiceBusyError
  )
  assert.equal(requests.length, 1)
})

scenario('a fork is not repeated after a lost connection', async (t) => {
  const { connection, requests } = await scripted(t, null)
  await assert.rejects(Sandbox.fork('a', connection), UnreachableError)
  assert.equal(requests.length, 1)
})

scenario('a read is repeated after a lost connection', async (t) => {
  const { connection, requests } = await scripted(t, null, null, [200, {}, '[]'])
  assert.deepEqual(await Host.engines(connection), [])
  assert.equal(requests.length, 3)
})

scenario('a response that cannot be parsed is not repeated', async (t) => {
  const { connection, requests } = await scripted(t, [200, {}, '{}'])
  await assert.rejects(Snapshot.get('a', connection), (error) => !(error instanceof UnreachableError))
  assert.equal(requests.length, 1)
})

scenario('a fork is not repeated after a bad gateway', async (t) => {
  const { connection, requests } = await scripted(t, [502, {}, '{}'])
  await assert.rejects(Sandbox.fork('a', connection), isApiError)
  assert.equal(requests.length, 1)
})
