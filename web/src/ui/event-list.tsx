import { Link } from '@tanstack/react-router'
import { type SandboxEvent, useEvents } from '../api/events'
import { count } from '../lib/format'
import { visible } from '../lib/visible'
import { Empty, Problem, Skeleton, Time } from './controls'

/** Colours of important events. */
const looks: Record<string, string> = {
  'sandbox.failed': 'bad',
  'sandbox.killed': 'warn',
  'sandbox.ready': 'good',
  'sandbox.resumed': 'good',
  'key.revoked': 'warn',
  'secret.deleted': 'warn',
}

/** Returns the details of an event as a text. */
function details(event: SandboxEvent): string {
  const parts = [
    event.cause,
    event.type === 'sandbox.renamed' && `now ${event.name ?? 'without a name'}`,
    event.type === 'sandbox.timeoutChanged' && !event.endAt && 'no deadline',
    event.type === 'sandbox.forked' && count(event.count ?? 0, 'child', 'children'),
    event.type === 'sandbox.promoted' && `${count(event.count ?? 0, 'sandbox', 'sandboxes')} removed`,
    event.type === 'sandbox.snapshotTaken' && event.name,
    /^(key|secret)\./.test(event.type) && event.name,
    event.forkedFrom && `forked from ${event.forkedFrom}`,
  ]
  return parts.filter(Boolean).join(', ')
}

/** Events of a sandbox, or of the last hour, newest first. */
export function EventList({ sandbox }: { sandbox?: string }) {
  const list = useEvents(sandbox)
  const page = list.data
  if (list.error && !page) return <Problem error={list.error} onRetry={() => void list.refetch()} />
  if (!page) return <Skeleton rows={4} height={28} />
  if (page.events.length === 0)
    return (
      <Empty
        title={sandbox ? 'No events are retained' : 'No events in the last hour'}
        command="jiffy events --follow"
      />
    )
  return (
    <div className="table-wrap cards-narrow whole" tabIndex={0} role="region" aria-label="Events">
      <table className="table">
        <thead>
          <tr>
            <th>Event</th>
            <th>Time</th>
            {!sandbox && <th>Object</th>}
            <th>Details</th>
            <th className="wide-only">Caller</th>
          </tr>
        </thead>
        <tbody>
          {page.events.map((event) => (
            <tr key={event.id}>
              <td className="name">
                <span className={`badge ${looks[event.type] ?? ''}`}>{event.type}</span>
              </td>
              <td className="card-line" data-label="Time">
                <Time at={event.time} />
              </td>
              {!sandbox && (
                <td className="card-line" data-label="Object">
                  <EventObject event={event} />
                </td>
              )}
              <td className="card-line" data-label="Details">
                {visible(details(event)) || '–'}
              </td>
              <td className="wide-only">
                <code>{event.caller ?? 'host'}</code>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {page.more && <p className="muted">Older events: jiffy events</p>}
    </div>
  )
}

function EventObject({ event }: { event: SandboxEvent }) {
  const { sandboxID } = event
  if (sandboxID)
    return (
      <Link to="/sandboxes/$id" params={{ id: sandboxID }}>
        {visible(event.name ?? sandboxID)}
      </Link>
    )
  return <code>{event.buildID ?? event.keyID ?? '–'}</code>
}
