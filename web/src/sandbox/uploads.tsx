import { useSyncExternalStore } from 'react'
import { CallError, consoleHeaders, messageOf, callError, guestPath } from '../api/client'
import { bytes } from '../lib/format'
import { visible } from '../lib/visible'
import { Button, Meter } from '../ui/controls'

/** Returns the path of a file below a directory. */
export const join = (directory: string, path: string) => `${directory === '/' ? '' : directory}/${path}`

interface Upload {
  key: number
  name: string
  sent: number
  size: number
  state: 'waiting' | 'asking' | 'sending' | 'reading' | 'done' | 'failed'
  message?: string
  cancel: () => void
  answer?: (replace: boolean) => void
}

let uploads: Upload[] = []
let next = 1
const listeners = new Set<() => void>()

/** Adds a transfer to the list and returns its key. */
export function addTransfer(item: Omit<Upload, 'key' | 'sent'>): number {
  const key = next++
  uploads = [...uploads, { ...item, key, sent: 0 }]
  for (const listener of listeners) listener()
  return key
}

function change(key: number, update: Partial<Upload>) {
  uploads = uploads.map((u) => (u.key === key ? { ...u, ...update } : u))
  for (const listener of listeners) listener()
}

function remove(key: number) {
  uploads = uploads.filter((u) => u.key !== key)
  for (const listener of listeners) listener()
}

export { change as changeTransfer, remove as removeTransfer }

export const useUploads = () =>
  useSyncExternalStore(
    (listener) => {
      listeners.add(listener)
      return () => listeners.delete(listener)
    },
    () => uploads,
  )

/** Uploads files into a directory, one after another. Shows a dialog before a file is replaced. */
export async function upload(id: string, directory: string, files: { file: File; path: string }[], names: Set<string>) {
  const queue = files.map(({ file, path }) => {
    const key = addTransfer({ name: path, size: file.size, state: 'waiting', cancel: () => {} })
    return { key, file, path }
  })
  for (const { key, file, path } of queue) {
    if (!uploads.some((u) => u.key === key)) continue
    if (names.has(path)) {
      const replace = await new Promise<boolean>((answer) =>
        change(key, { state: 'asking', answer, cancel: () => answer(false) }),
      )
      if (!replace) {
        remove(key)
        continue
      }
    }
    try {
      await send(id, join(directory, path), file, key)
      change(key, { state: 'done', sent: file.size })
      setTimeout(() => remove(key), 3000)
    } catch (error) {
      if (uploads.some((u) => u.key === key)) change(key, { state: 'failed', message: messageOf(error) })
    }
  }
}

/** Sends a file. The browser reads it in pieces; `fetch` does not report progress. */
function send(id: string, path: string, file: File, key: number): Promise<void> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest()
    request.open('PUT', `${guestPath(id)}/file?path=${encodeURIComponent(path)}`)
    for (const [name, value] of Object.entries(consoleHeaders)) request.setRequestHeader(name, value)
    request.upload.onprogress = (event) => change(key, { sent: event.loaded })
    request.onload = () => {
      if (request.status < 300) return resolve()
      reject(callError(request.status, request.responseText))
    }
    request.onerror = () => reject(new CallError(0, 'unreachable', 'The upload was interrupted.'))
    request.onabort = () => {
      remove(key)
      reject(new Error('cancelled'))
    }
    change(key, { state: 'sending', cancel: () => request.abort() })
    request.send(file)
  })
}

export function UploadList({ uploads: list }: { uploads: Upload[] }) {
  if (list.length === 0) return null
  return (
    <ul className="card uploads" aria-label="Transfers">
      {list.map((u) => (
        <li key={u.key} className="row">
          <span className="truncate grow">{visible(u.name)}</span>
          {u.state === 'asking' ? (
            <>
              <span>exists.</span>
              <Button small onClick={() => u.answer?.(true)}>
                Replace
              </Button>
              <Button small onClick={() => u.answer?.(false)}>
                Skip
              </Button>
            </>
          ) : u.state === 'failed' ? (
            <span className="problem">{visible(u.message ?? '')}</span>
          ) : u.state === 'reading' ? (
            <span className="muted nowrap">{bytes(u.sent)} read</span>
          ) : (
            <>
              <span className="muted nowrap">
                {bytes(u.sent)} of {bytes(u.size)}
              </span>
              <span style={{ width: 90 }}>
                <Meter used={u.sent} total={u.size} label={`Progress of ${visible(u.name)}`} />
              </span>
            </>
          )}
          <Button
            small
            look="ghost"
            icon="kill"
            label={u.state === 'failed' ? 'Dismiss' : 'Cancel'}
            onClick={() => {
              u.cancel()
              if (u.state !== 'sending' && u.state !== 'reading') remove(u.key)
            }}
          />
        </li>
      ))}
    </ul>
  )
}
