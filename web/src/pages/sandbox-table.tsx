import { type ReactNode, useCallback, useEffect } from 'react'
import type { Sandbox } from '../api/client'
import { useFigures } from '../api/queries'
import { useSession } from '../session'
import type { SandboxAction } from '../lib/actions'
import { isGroup, type Line } from '../lib/sandbox-filters'
import { visible } from '../lib/visible'
import { Spacer, useVirtualRows } from '../ui/virtual-rows'
import { SandboxRow } from './sandbox-row'

/** Height of a row in pixels. */
export const ROW = 38

export interface TableSelection {
  ids: string[]
  has: (id: string) => boolean
  toggle: (id: string, range?: boolean) => void
  all: () => void
  clear: () => void
}

/**
 * The table of sandboxes, of which only the visible rows are in the document. It is a component of its
 * own, so that scrolling does not draw the rest of the page again.
 */
export function SandboxTable({
  lines,
  order,
  selection,
  cursor,
  group,
  sort,
  onSort,
  metadata,
  hasEngine,
  hasKey,
  hasHost,
  onAction,
  children,
}: {
  lines: Line[]
  /** Ids of the sandboxes among the lines. The same list as long as they are equal. */
  order: string[]
  selection: TableSelection
  /** Position of the sandbox at which the keyboard is, in `order`. */
  cursor: number
  /** Metadata key by which the rows are grouped. */
  group?: string
  /** Column by which the rows are sorted, with a leading `-` in descending order. */
  sort: string
  onSort: (sort: string) => void
  /** Metadata keys that are shown as columns. */
  metadata: string[]
  hasEngine: boolean
  hasKey: boolean
  hasHost: boolean
  onAction: (action: SandboxAction, sandbox: Sandbox) => void
  /** Content below the rows. */
  children?: ReactNode
}) {
  const session = useSession()
  const groups = lines.length - order.length
  const keyOf = useCallback(
    (index: number) => {
      const line = lines[index]
      return !line ? index : isGroup(line) ? `group ${line.group}` : line.sandboxID
    },
    // Without groups, the order determines all keys.
    [order, groups, groups > 0 && lines],
  )
  const { scroller, items, measure, scrollToIndex, before, after } = useVirtualRows(lines.length, ROW, keyOf)
  const running = items.flatMap((item) => {
    const line = lines[item.index]
    return line && !isGroup(line) && line.state === 'running' ? [line.sandboxID] : []
  })
  const figures = useFigures(running)
  const current = order[cursor]
  useEffect(() => {
    const index = lines.findIndex((line) => !isGroup(line) && line.sandboxID === current)
    if (cursor > 0 && index >= 0) scrollToIndex(index)
  }, [cursor])

  const sortedBy = sort.replace(/^-/, '')
  const isDescending = sort.startsWith('-')
  const heading = (id: string, label: string, isNumber = false, isWide = false) => {
    const active = sortedBy === id
    const descending = active && isDescending
    return (
      <th
        key={id}
        className={`${isNumber ? 'num' : ''}${isWide ? ' wide-only' : ''}`}
        aria-sort={active ? (descending ? 'descending' : 'ascending') : undefined}>
        <button type="button" onClick={() => onSort(active && !descending ? `-${id}` : id)}>
          {label}
          {active && <span aria-hidden="true">{descending ? '↓' : '↑'}</span>}
        </button>
      </th>
    )
  }
  return (
    <div className="table-wrap cards-narrow" ref={scroller} tabIndex={0} role="region" aria-label="Sandboxes">
      <table className="table" aria-rowcount={lines.length}>
        <thead>
          <tr>
            <th className="check">
              <input
                type="checkbox"
                aria-label="Select all that match"
                checked={order.length > 0 && selection.ids.length === order.length}
                ref={(box) => {
                  if (box) box.indeterminate = selection.ids.length > 0 && selection.ids.length < order.length
                }}
                onChange={(e) => (e.target.checked ? selection.all() : selection.clear())}
              />
            </th>
            {heading('name', 'Name')}
            {heading('state', 'State')}
            {heading('template', 'Template')}
            {metadata.map((key) => (
              <th key={`meta ${key}`} className="wide-only">
                {visible(key)}
              </th>
            ))}
            {heading('age', 'Age', true)}
            {heading('remaining', 'Remaining', true)}
            {heading('cpu', 'Processors', true, true)}
            {heading('memory', 'Memory', true, true)}
            {heading('disk', 'Disk', true, true)}
            <th className="num wide-only">Network</th>
            {hasEngine && heading('engine', 'Engine', false, true)}
            {hasKey && heading('key', 'Key', false, true)}
            {hasHost && heading('host', 'Host', false, true)}
            <th className="actions-cell">
              <span className="sr-only">Actions</span>
            </th>
          </tr>
        </thead>
        <tbody>
          <Spacer height={before} />
          {items.map((item) => {
            const line = lines[item.index]
            if (!line) return null
            if (isGroup(line)) {
              return (
                <tr key={item.key} data-index={item.index} ref={measure} className="group">
                  <td colSpan={20}>
                    {group}: {line.group ? visible(line.group) : 'none'} <span className="muted">({line.count})</span>
                  </td>
                </tr>
              )
            }
            return (
              <SandboxRow
                key={item.key}
                index={item.index}
                measure={measure}
                sandbox={line}
                figures={figures?.[line.sandboxID]}
                selected={selection.has(line.sandboxID)}
                hasCursor={current === line.sandboxID}
                metadata={metadata}
                hasEngine={hasEngine}
                hasKey={hasKey}
                hasHost={hasHost}
                mayChange={session.mayChange}
                onSelect={selection.toggle}
                onAction={(action) => onAction(action, line)}
              />
            )
          })}
          <Spacer height={after} />
        </tbody>
      </table>
      {children}
    </div>
  )
}
