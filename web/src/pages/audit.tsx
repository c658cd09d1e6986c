import { useInfiniteQuery } from '@tanstack/react-query'
import { api, data, type Schemas } from '../api/client'
import { useSession } from '../session'
import { useFilters } from '../lib/filters'
import { count } from '../lib/format'
import { visible } from '../lib/visible'
import { Button, Empty, Problem, Skeleton, Time } from '../ui/controls'
import { FilterSelect, SearchField } from '../ui/filters'
import { NotPermitted } from '../ui/not-permitted'

type Entry = Schemas['AuditEntry']

interface Filters {
  call?: string
  key?: string
  address?: string
  result?: string
}

/** Number of entries of a page. */
const PAGE = 100
/** Interval at which the newest entries are read. */
const INTERVAL = 5000

export function AuditPage() {
  const session = useSession()
  return (
    <div className="page">
      <header className="page-head">
        <h1>Audit</h1>
      </header>
      {session.isAdmin ? <Audit /> : <NotPermitted what="Calls of all keys are" scope="admin" />}
    </div>
  )
}

/** Pages of the audit log, newest first. */
function useAudit({ call, key, address, result }: Filters) {
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
  const [filters, update] = useFilters<Filters>()
  const log = useAudit(filters)
  const entries = log.data?.pages.flatMap((page) => page.entries)
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
      {dropped && <p className="muted">Some entries of this time are no longer retained.</p>}
      {log.hasNextPage && (
        <Button busy={log.isFetchingNextPage} onClick={() => void log.fetchNextPage()}>
          Older entries
        </Button>
      )}
    </>
  )
}

function Entries({ entries }: { entries: Entry[] }) {
  return (
    <div className="table-wrap cards-narrow whole" tabIndex={0} role="region" aria-label="Calls">
      <table className="table">
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
          {entries.map((entry) => (
            <tr key={entry.id}>
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
          ))}
        </tbody>
      </table>
    </div>
  )
}
