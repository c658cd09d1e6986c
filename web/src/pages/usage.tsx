import { useState } from 'react'
import { useInfiniteQuery } from '@tanstack/react-query'
import { api, data, type Schemas } from '../api/client'
import { useSession } from '../session'
import { bytes, duration } from '../lib/format'
import { usageCommand } from '../lib/key-commands'
import { addUsage, usageByDay, usageByKey, type UsageTotal } from '../lib/usage'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { Button, Empty, Problem, Skeleton } from '../ui/controls'

/** Number of entries of a page of the API. */
const PAGE = 1000
const INTERVAL = 60_000
const DAY_MS = 24 * 3600 * 1000
const periods = [7, 30, 90, 400]

const day = (ms: number) => new Date(ms).toISOString().slice(0, 10)

/** Reads the usage of the last days. */
function useUsage(days: number) {
  return useInfiniteQuery({
    queryKey: ['usage', days],
    initialPageParam: '',
    queryFn: async ({ pageParam, signal }) => {
      const from = day(Date.now() - (days - 1) * DAY_MS)
      const query = { from, after: pageParam || undefined, limit: PAGE }
      return data(await api.GET('/usage', { params: { query }, signal }))!
    },
    getNextPageParam: (page) => page.next,
    refetchInterval: INTERVAL,
  })
}

/** Usage of keys: of each key, or of one key by day. */
export function UsageCard() {
  const session = useSession()
  const [days, setDays] = useState(30)
  const [selected, select] = useState<string>()
  const usage = useUsage(days)
  const entries = usage.data?.pages.flatMap((page) => page.usage)
  const missing = [...new Set(usage.data?.pages.flatMap((page) => page.missingHosts ?? []))]
  const key = session.isAdmin ? selected : (session.keyID ?? undefined)
  const rows = entries && (key === undefined ? usageByKey(entries) : usageByDay(entries, key))
  const name = key === undefined ? undefined : nameOf(entries?.find((entry) => (entry.keyID ?? 'owner') === key))
  return (
    <section aria-label="Usage">
      <div className="filters">
        <h2>Usage{name !== undefined && session.isAdmin && ` of ${name}`}</h2>
        <select
          className="select"
          aria-label="Period of usage"
          value={days}
          onChange={(e) => setDays(Number(e.target.value))}>
          {periods.map((period) => (
            <option key={period} value={period}>
              Last {period} days
            </option>
          ))}
        </select>
        {session.isAdmin && key !== undefined && <Button onClick={() => select(undefined)}>All keys</Button>}
      </div>
      {usage.error && <Problem error={usage.error} onRetry={() => void usage.refetch()} />}
      {!rows && !usage.error && <Skeleton rows={4} height={28} />}
      {rows?.length === 0 && <Empty title="No usage in this period" command="jiffy usage" />}
      {rows && rows.length > 0 && (
        <UsageTable rows={rows} isByDay={key !== undefined} onSelect={session.isAdmin ? select : undefined} />
      )}
      {missing.length > 0 && (
        <p className="muted">Without the hosts {visible(missing.join(', '))}, which do not answer.</p>
      )}
      {usage.hasNextPage && (
        <Button busy={usage.isFetchingNextPage} onClick={() => void usage.fetchNextPage()}>
          More usage
        </Button>
      )}
      <AsCommand command={usageCommand(day(Date.now() - (days - 1) * DAY_MS), key)} />
    </section>
  )
}

const nameOf = (entry: Schemas['DailyUsage'] | undefined) =>
  entry?.keyID == null ? 'owner of the host' : visible(entry.keyName ?? entry.keyID)

function UsageTable({
  rows,
  isByDay,
  onSelect,
}: {
  rows: UsageTotal[]
  isByDay: boolean
  onSelect?: (key: string) => void
}) {
  const total = rows.reduce(addUsage)
  return (
    <div className="table-wrap cards-narrow whole" tabIndex={0} role="region" aria-label="Usage by key or day">
      <table className="table">
        <thead>
          <tr>
            <th>{isByDay ? 'Day' : 'Key'}</th>
            <th className="num">Sandboxes</th>
            <th className="num">Processor</th>
            <th className="num">Memory</th>
            <th className="num">Stored</th>
            <th className="num">Sent</th>
            <th className="num">Requests</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={isByDay ? row.date : (row.keyID ?? 'owner')}>
              <td className="name">
                {isByDay ? (
                  row.date
                ) : onSelect ? (
                  <button type="button" className="link" onClick={() => onSelect(row.keyID ?? 'owner')}>
                    {nameOf(row)}
                  </button>
                ) : (
                  nameOf(row)
                )}
              </td>
              <Amounts row={row} />
            </tr>
          ))}
          {rows.length > 1 && (
            <tr>
              <td className="name">Total</td>
              <Amounts row={total} />
            </tr>
          )}
        </tbody>
      </table>
    </div>
  )
}

/** Formats an amount of space, times time. */
const gibHours = (gibSeconds: number) => `${Number((gibSeconds / 3600).toPrecision(3))} GiB·h`

function Amounts({ row }: { row: UsageTotal }) {
  const cells: [string, string][] = [
    ['Sandboxes', duration(row.sandboxSeconds)],
    ['Processor', duration(row.cpuSeconds)],
    ['Memory', gibHours(row.memoryGibSeconds)],
    ['Stored', row.storedGibSeconds === 0 ? bytes(0) : gibHours(row.storedGibSeconds)],
    ['Sent', bytes(row.sentBytes)],
    ['Requests', row.functionRequests.toLocaleString()],
  ]
  return cells.map(([label, text]) => (
    <td key={label} className="num card-line" data-label={label}>
      {text}
    </td>
  ))
}
