import { useMemo, useState } from 'react'
import { useNavigate } from '@tanstack/react-router'
import { useSandboxes, useSnapshots, useTemplates } from '../api/queries'
import { useSession } from '../session'
import { visible } from '../lib/visible'
import { Dialog } from './controls'

interface Entry {
  key: string
  kind: string
  label: string
  detail?: string
  run: () => void
}

const MAX_SHOWN = 12

/** Opens objects by name or prefix of their id, and pages. */
export function Palette({ onClose }: { onClose: () => void }) {
  const [text, setText] = useState('')
  const [cursor, setCursor] = useState(0)
  const navigate = useNavigate()
  const session = useSession()
  const sandboxes = useSandboxes().data
  const snapshots = useSnapshots().data
  const templates = useTemplates().data

  const entries = useMemo(() => {
    const all: Entry[] = []
    const go = (label: string, to: string) =>
      all.push({ key: to, kind: 'page', label, run: () => void navigate({ to }) })
    if (session.mayChange) go('Create a sandbox', '/new')
    go('Overview', '/overview')
    go('Sandboxes', '/sandboxes')
    go('Snapshots', '/snapshots')
    go('Lineage', '/lineage')
    go('Templates', '/templates')
    go('Functions', '/functions')
    if (session.isAdmin) go('Hosts', '/hosts')
    if (session.isAdmin) go('Audit', '/audit')
    go('Keys and sessions', '/keys')
    for (const s of sandboxes ?? []) {
      all.push({
        key: s.sandboxID,
        kind: 'sandbox',
        label: s.name ?? s.sandboxID,
        detail: s.name ? s.sandboxID : s.alias,
        run: () => void navigate({ to: '/sandboxes/$id', params: { id: s.sandboxID } }),
      })
    }
    for (const s of snapshots ?? []) {
      if (s.purpose !== 'asked') continue
      all.push({
        key: s.snapshotID,
        kind: 'snapshot',
        label: s.jiffy.name ?? s.snapshotID,
        detail: s.snapshotID,
        run: () => void navigate({ to: '/lineage', search: { at: s.snapshotID } }),
      })
    }
    for (const t of templates ?? []) {
      all.push({
        key: t.templateID,
        kind: 'template',
        label: t.names[0] ?? t.templateID,
        run: () => void navigate({ to: '/templates', search: { q: t.names[0] ?? t.templateID } }),
      })
    }
    const wanted = text.trim().toLowerCase()
    const found = all.filter((e) => {
      return e.label.toLowerCase().includes(wanted) || e.key.startsWith(wanted) || e.detail?.startsWith(wanted)
    })
    return found.slice(0, MAX_SHOWN)
  }, [text, sandboxes, snapshots, templates, navigate, session.mayChange])

  const run = (entry: Entry | undefined) => {
    if (!entry) return
    onClose()
    entry.run()
  }
  const onKey = (event: React.KeyboardEvent) => {
    if (event.key === 'ArrowDown') setCursor((c) => Math.min(entries.length - 1, c + 1))
    else if (event.key === 'ArrowUp') setCursor((c) => Math.max(0, c - 1))
    else if (event.key === 'Enter') run(entries[cursor])
    else return
    event.preventDefault()
  }
  return (
    <Dialog title="Go to" onClose={onClose}>
      <input
        className="input"
        autoFocus
        role="combobox"
        aria-expanded="true"
        aria-controls="palette-list"
        value={text}
        aria-activedescendant={entries[cursor] ? `palette-${cursor}` : undefined}
        aria-label="Name or prefix of an id"
        placeholder="Name or prefix of an id"
        onKeyDown={onKey}
        onChange={(e) => {
          setText(e.target.value)
          setCursor(0)
        }}
      />
      <ul id="palette-list" role="listbox" aria-label="Results">
        {entries.map((entry, index) => (
          <li
            key={entry.kind + entry.key}
            id={`palette-${index}`}
            role="option"
            aria-selected={index === cursor}
            className="menu-item"
            data-highlighted={index === cursor || undefined}
            onMouseMove={() => setCursor(index)}
            onClick={() => run(entry)}>
            <span className="tag">{entry.kind}</span>
            <span className="truncate grow">{visible(entry.label)}</span>
            {entry.detail && <code className="muted truncate">{visible(entry.detail)}</code>}
          </li>
        ))}
      </ul>
      {entries.length === 0 && <p className="muted">No object matches.</p>}
    </Dialog>
  )
}

const keys: [string, string][] = [
  ['Ctrl K', 'Go to a page, sandbox, snapshot or template'],
  [
    'g s, g o, g n, g l, g t, g f, g h, g k',
    'Sandboxes, overview, snapshots, lineage, templates, functions, hosts, keys, audit',
  ],
  ['c', 'Create a sandbox'],
  ['/', 'Search in the page'],
  ['j, k', 'Next and previous row'],
  ['x', 'Select the row'],
  ['Enter', 'Open the row'],
  ['Esc', 'Clear the selection, close a dialog'],
  ['?', 'These shortcuts'],
]

export function KeyHelp({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keyboard shortcuts" onClose={onClose}>
      <dl className="facts">
        {keys.map(([key, text]) => (
          <div key={key} style={{ display: 'contents' }}>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{text}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  )
}
