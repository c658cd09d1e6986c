import { call, guestPath, messageOf } from '../api/client'
import { count } from '../lib/format'
import { type TarEntry, tarEnd, tarHeader, tarPadding } from '../lib/tar'
import { notify } from '../ui/toast'
import type { Entry } from './files-tab'
import { addTransfer, changeTransfer, removeTransfer } from './uploads'

const LINK_MODE = 0o777

/** Saves a blob as a file. */
export function save(content: Blob, name: string) {
  const url = URL.createObjectURL(content)
  const link = document.createElement('a')
  link.href = url
  link.download = name
  link.click()
  // The browser has opened the blob when the click was handled.
  setTimeout(() => URL.revokeObjectURL(url), 1000)
}

/**
 * Downloads a directory as a tar archive. The browser reads the files one after another and holds
 * them as blobs, which it stores on disk if they are large.
 */
export async function downloadDirectory(id: string, root: Entry) {
  const abort = new AbortController()
  const key = addTransfer({ name: `${root.name}.tar`, size: 0, state: 'reading', cancel: () => abort.abort() })
  const parts: BlobPart[] = []
  let received = 0
  let skipped = 0
  const add = (entry: TarEntry, content?: Blob) => {
    parts.push(...tarHeader(entry))
    if (content) parts.push(content, tarPadding(content.size))
  }
  const walk = async (directory: string, prefix: string): Promise<void> => {
    const path = `${guestPath(id)}/entries?path=${encodeURIComponent(directory)}`
    const { entries } = await callJsonWith<{ entries: Entry[] }>(path, abort.signal)
    for (const entry of entries) {
      const common = {
        path: `${prefix}/${entry.name}`,
        mode: entry.mode,
        modified: Date.parse(entry.modified) / 1000,
        size: 0,
      }
      // The names of such entries are not valid UTF-8, so that no call can refer to them.
      if (entry.isBinaryName) skipped++
      else if (entry.symlinkTarget) add({ ...common, kind: 'symlink', mode: LINK_MODE, target: entry.symlinkTarget })
      else if (entry.kind === 'directory') {
        add({ ...common, kind: 'directory' })
        await walk(entry.path, common.path)
      } else if (entry.kind === 'file') {
        const response = await call(`${guestPath(id)}/file?path=${encodeURIComponent(entry.path)}`, {
          signal: abort.signal,
        })
        const content = await response.blob()
        add({ ...common, kind: 'file', size: content.size }, content)
        received += content.size
        changeTransfer(key, { sent: received })
      } else skipped++
    }
  }
  try {
    add({ path: root.name, kind: 'directory', mode: root.mode, modified: Date.parse(root.modified) / 1000, size: 0 })
    await walk(root.path, root.name)
    parts.push(tarEnd())
    save(new Blob(parts, { type: 'application/octet-stream' }), `${root.name}.tar`)
    removeTransfer(key)
    if (skipped > 0) notify(`${count(skipped, 'entry', 'entries')} without content or with an invalid name are missing`)
  } catch (error) {
    if (abort.signal.aborted) removeTransfer(key)
    else changeTransfer(key, { state: 'failed', message: messageOf(error) })
  }
}

async function callJsonWith<T>(path: string, signal: AbortSignal): Promise<T> {
  return (await (await call(path, { signal })).json()) as T
}
