// Files are written, read, listed, moved, removed, watched and linked to.
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { after, before, test } from 'node:test'
import { FileNotFoundError, InvalidArgumentError } from 'e2b'
import { create, Collected, limit, unique } from './support.js'

const BYTES = randomBytes(3_000_000)
const buffer = BYTES.buffer.slice(BYTES.byteOffset, BYTES.byteOffset + BYTES.length)

let sandbox
after(() => sandbox?.kill())
before(async () => {
  sandbox = await create(null)
})

test('text is read as it was written', limit, async () => {
  const path = `/tmp/${unique()} ünï`
  const info = await sandbox.files.write(path, 'zeile\r\nünï🦀\0end')
  assert.equal(info.path, path)
  assert.equal(await sandbox.files.read(path), 'zeile\r\nünï🦀\0end')
})

for (const [name, options] of [['multipart', {}], ['octet-stream', { useOctetStream: true }], ['gzip', { gzip: true }]]) {
  test(`bytes arrive completely when sent as ${name}`, limit, async () => {
    const path = `/tmp/${unique()}`
    await sandbox.files.write(path, buffer, options)
    assert.ok(BYTES.equals(await sandbox.files.read(path, { format: 'bytes' })))
    assert.ok(BYTES.equals(await sandbox.files.read(path, { format: 'bytes', gzip: true })))
    assert.ok(BYTES.equals(Buffer.from(await (await sandbox.files.read(path, { format: 'blob' })).arrayBuffer())))
  })
}

test('uploads and downloads can be streamed', limit, async () => {
  const path = `/tmp/${unique()}`
  const pieces = []
  for (let at = 0; at < BYTES.length; at += 70_000) pieces.push(BYTES.subarray(at, at + 70_000))
  await sandbox.files.write(path, ReadableStream.from(pieces))
  const got = []
  for await (const piece of await sandbox.files.read(path, { format: 'stream' })) got.push(piece)
  assert.ok(got.length > 1)
  assert.ok(BYTES.equals(Buffer.concat(got)))
})

test('an empty file exists and is empty', limit, async () => {
  const path = `/tmp/${unique()}`
  await sandbox.files.write(path, '')
  assert.equal(await sandbox.files.read(path), '')
  assert.equal((await sandbox.files.read(path, { format: 'bytes' })).length, 0)
})

test('several files are uploaded to their own paths', limit, async () => {
  const top = `/tmp/${unique()}`
  const files = Array.from({ length: 30 }, (_, n) => ({ path: `${top}/deep/${n}/name ${n}`, data: `content ${n}` }))
  const infos = await sandbox.files.write(files)
  assert.deepEqual(infos.map((info) => info.path), files.map((file) => file.path))
  assert.equal(await sandbox.files.read(files[17].path), 'content 17')
})

test('files are listed, described, moved and removed', limit, async () => {
  const top = `/home/user/${unique()}`
  assert.equal(await sandbox.files.makeDir(`${top}/a/b`), true)
  assert.equal(await sandbox.files.makeDir(`${top}/a/b`), false)
  await sandbox.files.write(`${top}/a/file`, '12345', { metadata: { origin: 'test' } })
  await sandbox.commands.run(`chmod 640 ${top}/a/file; ln -s ${top}/a/file ${top}/link`)
  const names = (entries) => entries.map((entry) => entry.path.slice(top.length + 1)).sort()
  assert.deepEqual(names(await sandbox.files.list(top)), ['a', 'link'])
  assert.deepEqual(names(await sandbox.files.list(top, { depth: 2 })), ['a', 'a/b', 'a/file', 'link'])
  const info = await sandbox.files.getInfo(`${top}/a/file`)
  assert.deepEqual([info.size, info.type, info.owner, info.permissions], [5, 'file', 'user', '-rw-r-----'])
  assert.deepEqual(info.metadata, { origin: 'test' })
  assert.ok(Math.abs(info.modifiedTime - Date.now()) < 60_000)
  assert.equal((await sandbox.files.getInfo(`${top}/link`)).symlinkTarget, `${top}/a/file`)
  assert.equal((await sandbox.files.rename(`${top}/a/file`, `${top}/moved`)).path, `${top}/moved`)
  assert.equal(await sandbox.files.exists(`${top}/a/file`), false)
  assert.equal(await sandbox.files.read(`${top}/moved`), '12345')
  await sandbox.files.remove(top)
  assert.equal(await sandbox.files.exists(top), false)
})

test('missing files and directories are errors', limit, async () => {
  const path = `/tmp/${unique()}`
  for (const call of [
    () => sandbox.files.read(path),
    () => sandbox.files.read(path, { format: 'stream' }),
    () => sandbox.files.getInfo(path),
    () => sandbox.files.list(path),
    () => sandbox.files.rename(path, `${path}.new`),
    () => sandbox.files.watchDir(path, () => {}),
  ]) await assert.rejects(call(), FileNotFoundError)
  await assert.rejects(sandbox.files.read('/tmp'), InvalidArgumentError)
})

test('events in a directory are reported', limit, async () => {
  const top = `/tmp/${unique()}`
  await sandbox.files.makeDir(top)
  const seen = new Collected()
  const exit = new Collected()
  const options = { recursive: true, includeEntry: true, onExit: exit.push }
  const watch = await sandbox.files.watchDir(top, seen.push, options)
  const sees = (type, name) => seen.until(() => seen.items.find((event) => event.type === type && event.name === name))
  await sandbox.files.write(`${top}/file`, 'x')
  assert.equal((await sees('create', 'file')).entry.path, `${top}/file`)
  await sees('write', 'file')
  await sandbox.files.makeDir(`${top}/later`)
  await sees('create', 'later')
  await sandbox.files.write(`${top}/later/two`, 'x')
  await sees('create', 'later/two')
  await sandbox.files.rename(`${top}/file`, `${top}/other`)
  await sees('rename', 'file')
  await sandbox.files.remove(`${top}/other`)
  await sees('remove', 'other')
  await watch.stop()
  await exit.until(() => exit.items.length === 1)
})

test('signed links download and upload one file without a token', limit, async (t) => {
  const path = `/tmp/${unique()} ünï&?`
  const other = await create(t)
  await sandbox.files.write(path, 'mine')
  await other.files.write(path, "the other's")
  assert.equal(await (await fetch(await sandbox.downloadUrl(path))).text(), 'mine')
  assert.equal(await (await fetch(await other.downloadUrl(path))).text(), "the other's")
  const form = new FormData()
  form.append('file', new Blob(['from a browser']), 'whatever.txt')
  const link = await sandbox.uploadUrl(path, { useSignatureExpiration: 60_000 })
  assert.equal((await fetch(link, { method: 'POST', body: form })).status, 200)
  assert.equal(await sandbox.files.read(path), 'from a browser')
  const changed = new URL(await sandbox.downloadUrl(path))
  changed.searchParams.set('path', '/etc/passwd')
  assert.ok([401, 404, 502].includes((await fetch(changed)).status))
})
