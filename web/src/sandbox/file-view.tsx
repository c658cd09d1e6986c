import { lazy, Suspense, useEffect, useState } from 'react'
import { useQuery } from '@tanstack/react-query'
import { call, CallError, guestPath } from '../api/client'
import { bytes } from '../lib/format'
import { visible } from '../lib/visible'
import { Button, Dialog, Problem, Skeleton } from '../ui/controls'
import { notify } from '../ui/toast'
import type { Entry } from './files-tab'

const CodeEditor = lazy(() => import('./code-editor').then((m) => ({ default: m.CodeEditor })))
const Differences = lazy(() => import('./code-editor').then((m) => ({ default: m.Differences })))

/** Maximum size of files that are edited or shown. */
const MAX_TEXT = 5 * 1024 * 1024
/** Bytes that are shown of a binary file. */
const MAX_HEX = 4096

// Only formats without scripts are shown as pictures.
const pictures: Record<string, string> = {
  png: 'image/png',
  jpg: 'image/jpeg',
  jpeg: 'image/jpeg',
  gif: 'image/gif',
  webp: 'image/webp',
  avif: 'image/avif',
  bmp: 'image/bmp',
}

type Content =
  | { kind: 'text'; text: string }
  | { kind: 'picture'; url: string }
  | { kind: 'binary'; hex: string }
  | { kind: 'large' }

function hex(data: Uint8Array): string {
  const lines: string[] = []
  for (let at = 0; at < Math.min(data.length, MAX_HEX); at += 16) {
    const row = [...data.subarray(at, at + 16)]
    const digits = row
      .map((b) => b.toString(16).padStart(2, '0'))
      .join(' ')
      .padEnd(47)
    const text = row.map((b) => (b >= 32 && b < 127 ? String.fromCharCode(b) : '.')).join('')
    lines.push(`${at.toString(16).padStart(8, '0')}  ${digits}  ${text}`)
  }
  return lines.join('\n')
}

async function load(id: string, entry: Entry, signal: AbortSignal): Promise<Content> {
  if (entry.size > MAX_TEXT) return { kind: 'large' }
  const response = await call(`${guestPath(id)}/file?path=${encodeURIComponent(entry.path)}`, { signal })
  const data = new Uint8Array(await response.arrayBuffer())
  const type = pictures[entry.name.split('.').pop()?.toLowerCase() ?? '']
  if (type) return { kind: 'picture', url: URL.createObjectURL(new Blob([data], { type })) }
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(data)
    if (!text.includes('\0')) return { kind: 'text', text }
  } catch {
    // Not UTF-8: shown as hex.
  }
  return { kind: 'binary', hex: hex(data) }
}

/** Shows or edits a file. */
export function FileView({
  id,
  entry,
  onClose,
  onDownload,
  onSaved,
}: {
  id: string
  entry: Entry
  onClose: () => void
  onDownload: () => void
  onSaved: () => void
}) {
  // The file is loaded once: changes in the guest must not replace the user's edits.
  const [opened, setOpened] = useState(entry)
  const [draft, setDraft] = useState<string>()
  const [busy, setBusy] = useState(false)
  const [conflict, setConflict] = useState<string>()
  // The differences can be edited. The editor then starts again with the result.
  const [revision, setRevision] = useState(0)
  const [error, setError] = useState<unknown>()
  const content = useQuery({
    queryKey: ['file', id, opened.path, opened.modified],
    queryFn: ({ signal }) => load(id, opened, signal),
    enabled: entry.kind === 'file',
    gcTime: 0,
    staleTime: Infinity,
    retry: false,
  })
  const url = content.data?.kind === 'picture' ? content.data.url : undefined
  useEffect(
    () => () => {
      if (url) URL.revokeObjectURL(url)
    },
    [url],
  )
  const text = content.data?.kind === 'text' ? content.data.text : undefined
  const isDirty = draft !== undefined && draft !== text
  const hasChanged = entry.modified !== opened.modified
  useEffect(() => {
    if (hasChanged && !isDirty) {
      setDraft(undefined)
      setOpened(entry)
    }
  }, [hasChanged, isDirty])

  const save = async (force: boolean) => {
    if (draft === undefined) return
    setBusy(true)
    setError(undefined)
    try {
      const guard = force ? '' : `&unless_changed_since=${encodeURIComponent(opened.modified)}`
      await call(`${guestPath(id)}/file?path=${encodeURIComponent(opened.path)}${guard}`, {
        method: 'PUT',
        body: draft,
      })
      const response = await call(
        `${guestPath(id)}/entries?path=${encodeURIComponent(opened.path.replace(/\/[^/]*$/, '') || '/')}`,
      )
      const { entries } = (await response.json()) as { entries: Entry[] }
      setOpened(entries.find((e) => e.path === opened.path) ?? entry)
      setDraft(undefined)
      setConflict(undefined)
      notify(`Saved ${opened.name}`)
      onSaved()
    } catch (e) {
      if (e instanceof CallError && e.code === 'file_changed') {
        const response = await call(`${guestPath(id)}/file?path=${encodeURIComponent(opened.path)}`).catch(
          () => undefined,
        )
        setConflict((await response?.text()) ?? '')
      } else setError(e)
    } finally {
      setBusy(false)
    }
  }
  return (
    <section className="card file-view" aria-label={`File ${visible(entry.name)}`}>
      <div className="card-head">
        <h2 className="truncate">
          {visible(entry.name)}
          {isDirty && ' •'}
        </h2>
        <div className="row">
          <span className="muted nowrap">{bytes(entry.size)}</span>
          {text !== undefined && (
            <Button small look="primary" disabled={!isDirty} busy={busy} onClick={() => void save(false)}>
              Save
            </Button>
          )}
          <Button small icon="download" label="Download" onClick={onDownload} />
          <Button small look="ghost" icon="kill" label="Close the file" onClick={onClose} />
        </div>
      </div>
      {hasChanged && isDirty && (
        <div className="banner" role="status">
          The file has changed in the sandbox since you opened it.
        </div>
      )}
      {error !== undefined && <Problem error={error} title="The file was not saved" />}
      {entry.kind !== 'file' && (
        <p className="card-body muted">
          This is {entry.kind === 'symlink' ? 'a link without a target' : 'a socket, pipe or device'}. It has no content
          to show.
        </p>
      )}
      {content.error && <Problem error={content.error} onRetry={() => void content.refetch()} />}
      {entry.kind === 'file' && content.isLoading && (
        <div className="card-body">
          <Skeleton rows={8} />
        </div>
      )}
      {text !== undefined && (
        <Suspense fallback={<Skeleton rows={8} />}>
          <CodeEditor
            key={revision}
            draft={draft}
            name={entry.name}
            label={`Content of ${visible(entry.name)}`}
            text={text}
            onChange={setDraft}
            onSave={() => void save(false)}
          />
        </Suspense>
      )}
      {content.data?.kind === 'picture' && (
        <div className="picture">
          <img src={content.data.url} alt={visible(entry.name)} />
        </div>
      )}
      {content.data?.kind === 'binary' && (
        <pre className="hex mono" tabIndex={0} aria-label="Content as hexadecimal digits">
          {content.data.hex}
          {entry.size > MAX_HEX && `\n… ${bytes(entry.size - MAX_HEX)} more`}
        </pre>
      )}
      {content.data?.kind === 'large' && (
        <p className="card-body muted">The file is larger than {bytes(MAX_TEXT)}. Download it to see its content.</p>
      )}
      {conflict !== undefined && draft !== undefined && (
        <Dialog
          title="The file has changed meanwhile"
          wide
          onClose={() => setConflict(undefined)}
          description="Another process changed the file after you opened it.">
          <p className="muted">
            Left or red: the file in the sandbox. Right or green: your version, which you can edit.
          </p>
          <Suspense fallback={<Skeleton rows={8} />}>
            <Differences name={entry.name} theirs={conflict} mine={draft} onChange={setDraft} />
          </Suspense>
          <div className="buttons">
            <Button
              onClick={() => {
                setRevision(revision + 1)
                setConflict(undefined)
              }}>
              Continue editing
            </Button>
            <Button
              onClick={() => {
                setDraft(undefined)
                setConflict(undefined)
                setOpened(entry)
                setRevision(revision + 1)
              }}>
              Discard mine
            </Button>
            <Button look="primary danger" onClick={() => void save(true)}>
              Overwrite
            </Button>
          </div>
        </Dialog>
      )}
    </section>
  )
}
