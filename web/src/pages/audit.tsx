import { useCallback, useMemo } from 'react'
import { useInfiniteQuery } from '@tanstack/react-query'
import { api, data, type Schemas } from '../api/client'
import { useSession } from '../session'
import { useFilters } from '../lib/filters'
import { type AuditFilters, auditCommand } from '../lib/host-commands'
import { count } from '../lib/format'
import { visible } from '../lib/visible'
import { Button, Empty, Problem, Skeleton, Time } from '../ui/controls'
import { FilterSelect, SearchField } from '../ui/filters'
import { ViewCommand } from '../ui/log-lines'
import { NotPermitted } from '../ui/not-permitted'
import { Spacer, useVirtualRows } from '../ui/virtual-rows'

type Entry = Schemas['AuditEntry']

/** Number of entries of a page. */
const PAGE = 100
/** Estimated height of an entry, in pixels. */
const ROW = 38
/** Interval at which the newest entries are read. */
const INTERVAL = 5000

export function AuditPage() {
  const session = useSession()
  return (
    <div className="page fill">
      <header className="page-head">
        <h1>Audit</h1>
      </header>
      {session.isAdmin ? <Audit /> : <NotPermitted what="Calls of all keys are" scope="admin" />}
    </div>
  )
}

/** Pages of the audit log, newest first. */
function useAudit({ call, key, address, result }: AuditFilters) {
  return useInfiniteQuery({
    queryKey: ['audit', call ?? '', key ?? '', address ?? '', result ?? ''],
    initialPageParam: '',
    queryFn: async ({ pageParam, signal }) => {
      const selection = { call, keyID: key, address, rejected: result === 'rejected' || undefined }
      const query = { ...selection, before: pageParam || undefined, order: 'desc' as const, limit: PAGE }
      return data(await api.GET('/audit', { params: { query }, signal }))!
    },
    getNextPageParam: (page) => (page.more ? page.next : undefined),
    refetchInterval: (query) => ((query.state.data?.pages.length ?? 0) > 1 ? false : INTERVAL),
  })
}

function Audit() {
  const [filters, update] = useFilters<AuditFilters>()
  const log = useAudit(filters)
  const entries = useMemo(() => log.data?.pages.flatMap((page) => page.entries), [log.data])
  const dropped = log.data?.pages.at(-1)?.dropped
  return (
    <>
      <div className="filters" role="search">
        <SearchField
          label="Filter by call"
          placeholder="Method or path"
          value={filters.call}
          onChange={(call) => update({ call })}
        />
        <SearchField
          label="Filter by key"
          placeholder="Key id"
          value={filters.key}
          onChange={(key) => update({ key })}
        />
        <SearchField
          label="Filter by address"
          placeholder="Address"
          value={filters.address}
          onChange={(address) => update({ address })}
        />
        <FilterSelect
          label="Result"
          value={filters.result}
          options={['rejected']}
          onChange={(result) => update({ result })}
        />
        {entries && <span className="muted">{count(entries.length, 'entry', 'entries')}</span>}
      </div>
      {log.error && <Problem error={log.error} onRetry={() => void log.refetch()} />}
      {!entries && !log.error && <Skeleton rows={8} height={28} />}
      {entries?.length === 0 && <Empty title="No call matches" command="jiffy audit" />}
      {entries && entries.length > 0 && <Entries entries={entries} />}
      {entries && <ViewCommand command={auditCommand(filters)} />}
      {dropped && <p className="muted">Some entries of this time are no longer retained.</p>}
      {log.hasNextPage && (
        <Button busy={log.isFetchingNextPage} onClick={() => void log.fetchNextPage()}>
          Older entries
        </Button>
      )}
    </>
  )
}

/** Calls, of which only the visible ones are in the document. */
function Entries({ entries }: { entries: Entry[] }) {
  const keyOf = useCallback((index: number) => entries[index]?.id ?? index, [entries])
  const { scroller, items, measure, before, after } = useVirtualRows(entries.length, ROW, keyOf)
  return (
    <div className="table-wrap cards-narrow" ref={scroller} tabIndex={0} role="region" aria-label="Calls">
      <table className="table" aria-rowcount={entries.length + 1}>
        <thead>
          <tr>
            <th>Call</th>
            <th>Time</th>
            <th>Result</th>
            <th>Caller</th>
            <th>Object</th>
            <th className="wide-only">Address</th>
            <th className="num wide-only">Duration</th>
          </tr>
        </thead>
        <tbody>
          <Spacer height={before} />
          {items.map((item) => {
            const entry = entries[item.index]
            return entry && <EntryRow key={entry.id} entry={entry} index={item.index} measure={measure} />
          })}
          <Spacer height={after} />
        </tbody>
      </table>
    </div>
  )
}

function EntryRow({
  entry,
  index,
  measure,
}: {
  entry: Entry
  index: number
  measure: (element: Element | null) => void
}) {
  return (
    <tr data-index={index} ref={measure} aria-rowindex={index + 2}>
      <td className="name">
        <code>{visible(entry.call)}</code>
        {entry.command && (
          <span className="sub">
            <code>{visible(entry.command)}</code>
          </span>
        )}
        {entry.paths?.map((path) => (
          <span className="sub" key={path}>
            <code>{visible(path)}</code>
          </span>
        ))}
        {entry.count > 1 && <span className="sub">{count(entry.count, 'call')}, the last of them</span>}
      </td>
      <td className="card-line" data-label="Time">
        <Time at={entry.time} />
      </td>
      <td className="card-line" data-label="Result">
        <span className={`badge ${entry.status < 400 ? 'good' : entry.status < 500 ? 'warn' : 'bad'}`}>
          {entry.status}
        </span>{' '}
        {visible(entry.error_code ?? '')}
      </td>
      <td className="card-line" data-label="Caller">
        {entry.keyID ? <code>{visible(entry.keyID)}</code> : entry.caller}
        {entry.caller === 'token' && <span className="sub">with the token of the sandbox</span>}
        {entry.sessionID && <span className="sub">in the console</span>}
      </td>
      <td className="card-line" data-label="Object">
        <code>{visible(entry.sandboxID ?? entry.object ?? '–')}</code>
      </td>
      <td className="wide-only">
        <code>{entry.address ?? '–'}</code>
      </td>
      <td className="num wide-only">{entry.ms} ms</td>
    </tr>
  )
}
