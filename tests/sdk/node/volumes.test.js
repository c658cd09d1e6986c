// Volumes and their files, by the unmodified package.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import { Sandbox, Volume, VolumePathNotFoundError } from 'e2b'
import { limit } from './support.js'

test('files of a volume are written, listed, read and removed', limit, async (t) => {
  const volume = await Volume.create(`data-${randomUUID().slice(0, 8)}`)
  t.after(() => Volume.destroy(volume.volumeId))
  assert.ok((await Volume.list()).some((found) => found.volumeId === volume.volumeId))
  await volume.makeDir('/a', { mode: 0o750 })
  const written = await volume.writeFile('/a/text', 'hello')
  assert.equal(written.size, 5)
  assert.equal(await volume.readFile('/a/text'), 'hello')
  const entries = await volume.list('/', { depth: 2 })
  assert.deepEqual(
    entries.map((entry) => entry.path),
    ['/a', '/a/text'],
  )
  assert.equal((await volume.updateMetadata('/a/text', { mode: 0o600 })).mode, 0o600)
  await volume.remove('/a')
  assert.equal(await volume.exists('/a/text'), false)
  await assert.rejects(volume.readFile('/a/text'), VolumePathNotFoundError)
})

test('a sandbox mounts a volume, and its files outlive the sandbox', limit, async (t) => {
  const volume = await Volume.create(`data-${randomUUID().slice(0, 8)}`)
  t.after(() => Volume.destroy(volume.volumeId))
  await volume.writeFile('/from-client', 'client')
  let sandbox
  try {
    sandbox = await Sandbox.create({ volumeMounts: { '/data': volume } })
  } catch (error) {
    // Sandboxes on gVisor cannot mount volumes.
    assert.match(error.message, /gvisor/)
    return
  }
  try {
    assert.equal(await sandbox.files.read('/data/from-client'), 'client')
    await sandbox.commands.run('echo sandbox > /data/from-sandbox')
    const info = await sandbox.getInfo()
    assert.deepEqual(info.volumeMounts, [{ name: volume.name, path: '/data' }])
    await assert.rejects(Volume.destroy(volume.volumeId), /mounted/)
  } finally {
    await sandbox.kill()
  }
  assert.equal(await volume.readFile('/from-sandbox'), 'sandbox\n')
})
