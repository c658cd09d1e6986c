import { useEffect, useMemo, useRef, useState } from 'react'
import { useNavigate, useParams, useSearch } from '@tanstack/react-router'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useVirtualizer } from '@tanstack/react-virtual'
import { call, CallError, callJson, messageOf, guestPath } from '../api/client'
import { useSandbox } from '../api/queries'
import { useSession } from '../session'
import { bytes, count } from '../lib/format'
import { visible } from '../lib/visible'
import { Button, Dialog, Empty, Field, Menu, Problem, Skeleton, Time } from '../ui/controls'
import { Icon } from '../ui/icons'
import { notify } from '../ui/toast'
import { FileView } from './file-view'
import { downloadDirectory } from './tar-download'
import { join, upload, UploadList, useUploads } from './uploads'

export interface Entry {
  name: string
  path: string
  kind: 'file' | 'directory' | 'symlink' | 'other'
  size: number
  mode: number
  permissions: string
  owner: string
  group: string
  modified: string
  symlinkTarget: string | null
  isBinaryName: boolean
}

const ROW = 32

export function FilesTab() {
  const { id } = useParams({ strict: false }) as { id: string }
  const search = useSearch({ strict: false }) as { path?: string; file?: string }
  const navigate = useNavigate()
  const session = useSession()
  const queries = useQueryClient()
  const sandbox = useSandbox(id).data
  const directory = search.path ?? '/home/user'
  const isRunning = sandbox?.state === 'running'
  const [dialog, setDialog] = useState<DialogState>()
  const [isOver, setOver] = useState(false)
  const picker = useRef<HTMLInputElement>(null)
  const scroller = useRef<HTMLDivElement>(null)
  const uploads = useUploads()

  const list = useQuery({
    queryKey: ['files', id, directory],
    queryFn: async ({ signal }) => {
      const response = await call(`${guestPath(id)}/entries?path=${encodeURIComponent(directory)}`, { signal })
      const { entries } = (await response.json()) as { entries: Entry[] }
      const rank = (e: Entry) => (e.kind === 'directory' ? 0 : 1)
      return entries.sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name))
    },
    enabled: isRunning && session.mayChange,
    refetchInterval: 3000,
    retry: false,
  })
  // The home directory of the default user may not exist.
  useEffect(() => {
    if (!search.path && list.error instanceof CallError && list.error.status === 404) {
      void navigate({ to: '.', search: { path: '/' } as never, replace: true })
    }
  }, [list.error, search.path])
  const entries = list.data ?? []
  const virtual = useVirtualizer({
    count: entries.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW,
    overscan: 12,
  })
  const reload = () => void queries.invalidateQueries({ queryKey: ['files', id] })
  const go = (path: string, file?: string) => void navigate({ to: '.', search: { path, file } as never })
  const open = (entry: Entry) => (entry.kind === 'directory' ? go(entry.path) : go(directory, entry.name))

  const add = (files: { file: File; path: string }[]) => {
    const names = new Set(entries.map((e) => e.name))
    void upload(id, directory, files, names).then(reload, () => reload())
  }
  const download = async (entry: Entry) => {
    try {
      const { url } = await callJson<{ url: string }>('POST', `${guestPath(id)}/downloads`, { path: entry.path })
      const link = document.createElement('a')
      link.href = url
      link.download = entry.name
      link.click()
    } catch (error) {
      notify(messageOf(error), true)
    }
  }
  const parts = useMemo(() => directory.split('/').filter(Boolean), [directory])

  if (!session.mayChange)
    return (
      <Empty title="No files with this key">
        <p>
          Reading files of sandboxes requires a key of scope <code>create</code> or <code>admin</code>.
        </p>
      </Empty>
    )
  if (sandbox && !isRunning)
    return (
      <Empty title={`The sandbox is ${sandbox.state}`}>
        <p>Resume the sandbox to see its files.</p>
      </Empty>
    )
  const shown = search.file ? entries.find((e) => e.name === search.file) : undefined
  return (
    <div className="files">
      <div className="filters">
        <nav className="crumbs" aria-label="Directory">
          <button type="button" onClick={() => go('/')} aria-label="Root directory">
            /
          </button>
          {parts.map((part, index) => (
            <span key={index}>
              <button
                type="button"
                aria-current={index === parts.length - 1 || undefined}
                onClick={() => go(`/${parts.slice(0, index + 1).join('/')}`)}>
                {visible(part)}
              </button>
              {index < parts.length - 1 && '/'}
            </span>
          ))}
        </nav>
        <span className="muted">{list.data && count(entries.length, 'entry', 'entries')}</span>
        <span className="grow" />
        <Button small icon="upload" onClick={() => picker.current?.click()}>
          Upload
        </Button>
        <input
          ref={picker}
          type="file"
          multiple
          hidden
          onChange={(e) => {
            add([...(e.target.files ?? [])].map((file) => ({ file, path: file.name })))
            e.target.value = ''
          }}
        />
        <Button small icon="folder" onClick={() => setDialog({ kind: 'directory' })}>
          New directory
        </Button>
        <Button small icon="file" onClick={() => setDialog({ kind: 'file' })}>
          New file
        </Button>
      </div>
      <UploadList uploads={uploads} />
      <div className={`files-body${shown ? ' has-file' : ''}`}>
        {list.error && !list.data ? (
          <Problem error={list.error} onRetry={() => void list.refetch()} />
        ) : !list.data ? (
          <Skeleton rows={10} height={ROW - 8} />
        ) : (
          <div
            className="table-wrap file-list"
            data-over={isOver}
            ref={scroller}
            tabIndex={0}
            role="region"
            aria-label="Files. Drop files here to upload them"
            onDragOver={(e) => {
              e.preventDefault()
              setOver(true)
            }}
            onDragLeave={() => setOver(false)}
            onDrop={(e) => {
              e.preventDefault()
              setOver(false)
              void dropped(e.dataTransfer).then(add)
            }}>
            {entries.length === 0 && (
              <Empty title="This directory is empty">
                <p>Drop files here to upload them.</p>
              </Empty>
            )}
            <div style={{ height: virtual.getTotalSize(), position: 'relative' }} role="list">
              {virtual.getVirtualItems().map((item) => {
                const entry = entries[item.index]
                return (
                  entry && (
                    <div
                      key={entry.name + item.index}
                      role="listitem"
                      className="file-row"
                      data-active={entry === shown}
                      style={{ transform: `translateY(${item.start}px)` }}>
                      <button
                        type="button"
                        className="file-name truncate"
                        onClick={() => open(entry)}
                        title={visible(entry.path)}>
                        <Icon name={entry.kind === 'directory' ? 'folder' : 'file'} />
                        <span className="truncate">{visible(entry.name)}</span>
                        {entry.symlinkTarget && (
                          <span className="muted truncate">→ {visible(entry.symlinkTarget)}</span>
                        )}
                      </button>
                      <span className="file-size">{entry.kind === 'directory' ? '' : bytes(entry.size)}</span>
                      <span className="file-extra mono">{visible(entry.permissions)}</span>
                      <span className="file-extra">{visible(entry.owner)}</span>
                      <span className="file-extra">
                        <Time at={entry.modified} />
                      </span>
                      <Menu
                        label={`Actions on ${visible(entry.name)}`}
                        entries={[
                          { label: 'Open', icon: 'open', onSelect: () => open(entry) },
                          {
                            label: entry.kind === 'directory' ? 'Download as tar' : 'Download',
                            icon: 'download',
                            disabled: entry.kind === 'symlink' || entry.kind === 'other' || entry.isBinaryName,
                            onSelect: () =>
                              void (entry.kind === 'directory' ? downloadDirectory(id, entry) : download(entry)),
                          },
                          {
                            label: 'Rename',
                            icon: 'edit',
                            disabled: entry.isBinaryName,
                            onSelect: () => setDialog({ kind: 'rename', entry }),
                          },
                          'line',
                          {
                            label: 'Delete',
                            icon: 'trash',
                            danger: true,
                            disabled: entry.isBinaryName,
                            onSelect: () => setDialog({ kind: 'remove', entry }),
                          },
                        ]}
                      />
                    </div>
                  )
                )
              })}
            </div>
          </div>
        )}
        {shown && (
          <FileView
            key={shown.path}
            id={id}
            entry={shown}
            onClose={() => go(directory)}
            onDownload={() => void download(shown)}
            onSaved={reload}
          />
        )}
      </div>
      {dialog && (
        <FileDialog
          key={dialog.kind}
          id={id}
          directory={directory}
          dialog={dialog}
          names={entries.map((e) => e.name)}
          onClose={(changed) => {
            setDialog(undefined)
            if (changed) reload()
          }}
        />
      )}
    </div>
  )
}

/** Returns the dropped files, also those in directories. */
async function dropped(transfer: DataTransfer): Promise<{ file: File; path: string }[]> {
  const found: { file: File; path: string }[] = []
  const walk = async (entry: FileSystemEntry, path: string): Promise<void> => {
    if (entry.isFile) {
      const file = await new Promise<File>((resolve, reject) => (entry as FileSystemFileEntry).file(resolve, reject))
      found.push({ file, path })
      return
    }
    const reader = (entry as FileSystemDirectoryEntry).createReader()
    for (;;) {
      const batch = await new Promise<FileSystemEntry[]>((resolve, reject) => reader.readEntries(resolve, reject))
      if (batch.length === 0) return
      for (const child of batch) await walk(child, `${path}/${child.name}`)
    }
  }
  const roots: FileSystemEntry[] = []
  for (const item of transfer.items) {
    const entry = item.webkitGetAsEntry()
    if (entry) roots.push(entry)
    else {
      // Files of another page or program have no entry.
      const file = item.getAsFile()
      if (file) found.push({ file, path: file.name })
    }
  }
  for (const root of roots) await walk(root, root.name)
  return found
}

type DialogState = { kind: 'directory' | 'file' } | { kind: 'rename' | 'remove'; entry: Entry }

function FileDialog({
  id,
  directory,
  dialog,
  names,
  onClose,
}: {
  id: string
  directory: string
  dialog: DialogState
  names: string[]
  onClose: (changed: boolean) => void
}) {
  const [name, setName] = useState('entry' in dialog ? dialog.entry.name : '')
  const [error, setError] = useState<unknown>()
  const [busy, setBusy] = useState(false)
  const titles = { directory: 'New directory', file: 'New file', rename: 'Rename', remove: 'Delete' }
  const problem =
    dialog.kind !== 'remove' && name !== '' && (name.includes('/') || name === '.' || name === '..')
      ? 'The name must not contain /'
      : (dialog.kind === 'directory' || dialog.kind === 'file') && names.includes(name)
        ? 'The name exists'
        : undefined
  const submit = async () => {
    setBusy(true)
    setError(undefined)
    const path = join(directory, name)
    const at = (p: string) => `?path=${encodeURIComponent(p)}`
    try {
      if (dialog.kind === 'directory') await callJson('POST', `${guestPath(id)}/directories`, { path })
      else if (dialog.kind === 'file')
        await call(`${guestPath(id)}/file${at(path)}&unless_changed_since=`, { method: 'PUT', body: '' })
      else if ('entry' in dialog && dialog.kind === 'rename')
        await callJson('POST', `${guestPath(id)}/moves`, { from: dialog.entry.path, to: path })
      else if ('entry' in dialog) await callJson('DELETE', `${guestPath(id)}/entries${at(dialog.entry.path)}`)
      onClose(true)
    } catch (e) {
      setError(e)
      setBusy(false)
    }
  }
  return (
    <Dialog title={titles[dialog.kind]} onClose={() => onClose(false)}>
      <form
        className="stack"
        onSubmit={(e) => {
          e.preventDefault()
          if (!problem && name) void submit()
        }}>
        {'entry' in dialog && dialog.kind === 'remove' ? (
          <p>
            Delete <code>{visible(dialog.entry.path)}</code>
            {dialog.entry.kind === 'directory' && !dialog.entry.symlinkTarget ? ' with everything in it' : ''}? A
            snapshot is the only way back.
          </p>
        ) : (
          <Field id="file-name" label="Name" problem={problem}>
            <input id="file-name" className="input" autoFocus value={name} onChange={(e) => setName(e.target.value)} />
          </Field>
        )}
        {error !== undefined && <Problem error={error} />}
        <div className="buttons">
          <Button onClick={() => onClose(false)}>Cancel</Button>
          <Button
            type="submit"
            look={dialog.kind === 'remove' ? 'primary danger' : 'primary'}
            busy={busy}
            disabled={!!problem || !name}>
            {titles[dialog.kind]}
          </Button>
        </div>
      </form>
    </Dialog>
  )
}
