import { memo } from 'react'
import { useNavigate } from '@tanstack/react-router'
import type { Sandbox, Schemas } from '../api/client'
import { useNow } from '../api/queries'
import { type SandboxAction, sandboxActions } from '../lib/actions'
import { bytes, bytesOf, countDown, duration, localTime, mib, remaining, utcTime } from '../lib/format'
import { stateReason } from '../lib/state-reason'
import { visible } from '../lib/visible'
import { Menu } from '../ui/controls'
import { PlainLink } from '../ui/plain-link'
import { StateBadge } from '../ui/state-badge'

/** Maximum length of a reason in the table. The title of the cell has the complete text. */
const MAX_REASON = 200

interface Props {
  index: number
  measure: (element: Element | null) => void
  sandbox: Sandbox
  figures?: Schemas['Metric']
  selected: boolean
  hasCursor: boolean
  metadata: string[]
  hasEngine: boolean
  hasKey: boolean
  hasHost: boolean
  mayChange: boolean
  onSelect: (id: string, range?: boolean) => void
  onAction: (action: SandboxAction) => void
}

function Ages({ sandbox }: { sandbox: Sandbox }) {
  const now = useNow()
  const created = sandbox.jiffy.created_ms
  const left = sandbox.state === 'running' ? remaining(sandbox.jiffy.deadline_ms, now) : null
  const idle = sandbox.jiffy.terms.idle_timeout_s
  const unlimited = idle ? `idle ${duration(idle)}` : 'no limit'
  return (
    <>
      <td className="num card-line" title={`${localTime(created)}\n${utcTime(created)}`}>
        {duration((now - created) / 1000)}
      </td>
      <td className="num card-line">
        {left === null ? (sandbox.state === 'running' ? unlimited : '–') : countDown(left)}
      </td>
    </>
  )
}

/** Usage of a resource as text and as a bar. A share of 1 fills the bar. */
function Share({ text, share }: { text: string; share: number }) {
  return (
    <span className="usage">
      {text}
      <span className="bar" aria-hidden="true">
        <span style={{ width: `${Math.min(100, share * 100)}%` }} />
      </span>
    </span>
  )
}

/**
 * A row of the table. It is drawn again only if one of the properties that are compared below
 * changes. `mayChange` belongs to the session, and `measure` to the table: both remain the same.
 * The callbacks are new functions in each render, so they are not compared.
 */
export const SandboxRow = memo(
  function SandboxRow(props: Props) {
    const { sandbox, figures, selected, hasCursor } = props
    const navigate = useNavigate()
    const id = sandbox.sandboxID
    const name = sandbox.name ?? id
    const reason = stateReason(sandbox)
    const open = (tab: string) => void navigate({ to: `/sandboxes/$id/${tab}` as never, params: { id } as never })
    return (
      <tr
        data-index={props.index}
        ref={props.measure}
        aria-selected={selected}
        data-cursor={hasCursor}
        aria-rowindex={props.index + 1}>
        <td className="check">
          <input
            type="checkbox"
            aria-label={`Select ${visible(name)}`}
            checked={selected}
            // React requires this handler. The selection is in `onClick`, whose event has the state
            // of the shift key.
            onChange={() => {}}
            onClick={(event) => props.onSelect(id, event.shiftKey)}
          />
        </td>
        <td className="name">
          <PlainLink to={`/sandboxes/${id}`} title={id}>
            {visible(name)}
          </PlainLink>
          {sandbox.name && <code className="sub">{id.slice(0, 8)}</code>}
        </td>
        <td>
          <StateBadge state={sandbox.state} />
          {reason && (
            <span className="sub reason" title={visible(reason)}>
              {visible(reason.slice(0, MAX_REASON))}
            </span>
          )}
        </td>
        <td className="card-line">{visible(sandbox.alias)}</td>
        {props.metadata.map((key) => {
          const value = sandbox.metadata[key]
          return (
            <td key={key} className="wide-only" title={value && visible(value)}>
              {value === undefined ? '' : visible(value)}
            </td>
          )
        })}
        <Ages sandbox={sandbox} />
        <td className="num wide-only">
          {figures ? (
            <Share
              text={`${(figures.cpuUsedPct / 100).toFixed(1)} / ${sandbox.cpuCount}`}
              share={figures.cpuUsedPct / 100 / sandbox.cpuCount}
            />
          ) : (
            sandbox.cpuCount
          )}
        </td>
        <td className="num wide-only">
          {figures ? (
            <Share
              text={bytesOf(figures.memUsed, sandbox.memoryMB * 1048576)}
              share={figures.memUsed / (sandbox.memoryMB * 1048576)}
            />
          ) : (
            mib(sandbox.memoryMB)
          )}
        </td>
        <td className="num wide-only">
          {figures ? bytesOf(figures.diskUsed, sandbox.diskSizeMB * 1048576) : mib(sandbox.diskSizeMB)}
        </td>
        <td className="num wide-only">
          {figures?.netBytesIn !== undefined && figures.netBytesOut !== undefined ? (
            <>
              <span title="received">↓ {bytes(figures.netBytesIn)}</span>{' '}
              <span title="sent">↑ {bytes(figures.netBytesOut)}</span>
            </>
          ) : (
            '–'
          )}
        </td>
        {props.hasEngine && <td className="wide-only">{sandbox.engine ?? '–'}</td>}
        {props.hasKey && (
          <td className="wide-only">
            <code>{sandbox.jiffy.terms.owner?.slice(0, 8) ?? 'owner'}</code>
          </td>
        )}
        {props.hasHost && <td className="wide-only">{sandbox.host === undefined ? '–' : visible(sandbox.host)}</td>}
        <td className="actions-cell">
          <Menu
            label={`Actions on ${visible(name)}`}
            entries={() => [
              { label: 'Terminal', icon: 'command', onSelect: () => open('terminal') },
              { label: 'Files', icon: 'folder', onSelect: () => open('files') },
              { label: 'Lineage', icon: 'lineage', onSelect: () => open('lineage') },
              ...(props.mayChange ? ['line' as const] : []),
              ...(props.mayChange
                ? sandboxActions
                    .filter((a) => a.states.includes(sandbox.state))
                    .map((action) => ({
                      label: action.label,
                      icon: action.icon,
                      danger: action.danger,
                      onSelect: () => props.onAction(action),
                    }))
                : []),
            ]}
          />
        </td>
      </tr>
    )
  },
  (a, b) =>
    a.sandbox === b.sandbox &&
    a.figures === b.figures &&
    a.selected === b.selected &&
    a.hasCursor === b.hasCursor &&
    a.index === b.index &&
    a.metadata.join() === b.metadata.join() &&
    a.hasEngine === b.hasEngine &&
    a.hasKey === b.hasKey &&
    a.hasHost === b.hasHost,
)
