import { useRef, useState } from 'react'
import { useParams } from '@tanstack/react-router'
import { keepPreviousData, useQuery } from '@tanstack/react-query'
import { api, data, type Schemas } from '../api/client'
import { useSandbox } from '../api/queries'
import { useSession } from '../session'
import { commands } from '../lib/commands'
import { useFilters } from '../lib/filters'
import { bytes, count, duration } from '../lib/format'
import { orderProcesses, shareOf, type Measured } from '../lib/processes'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Empty, Menu, Problem, Skeleton, Time } from '../ui/controls'
import { SearchField } from '../ui/filters'

type Process = Schemas['GuestProcess']
type SignalName = Schemas['SignalName']

const INTERVAL_MS = 2000
/** Maximum number of shown processes. */
const MAX_SHOWN = 500
/** Indentation of a child in pixels, and the maximum depth that is indented. */
const INDENT = 14
const MAX_DEPTH = 12

const signals: [SignalName, string][] = [
  ['SIGTERM', 'Request to exit'],
  ['SIGKILL', 'Kill'],
  ['SIGINT', 'Interrupt'],
  ['SIGHUP', 'Hang up'],
  ['SIGSTOP', 'Stop'],
  ['SIGCONT', 'Continue'],
]

const states: Record<string, string> = {
  R: 'running',
  S: 'sleeping',
  D: 'waiting for a disk',
  T: 'stopped',
  t: 'traced',
  Z: 'exited',
  I: 'idle',
}

/** Processes of the sandbox as a tree, or by processor or memory, with signals. */
export function ProcessesTab() {
  const { id } = useParams({ strict: false }) as { id: string }
  const session = useSession()
  const sandbox = useSandbox(id).data
  const [filters, update] = useFilters<{ q?: string; sort?: string }>()
  const [target, setTarget] = useState<{ process: Process; signal: SignalName }>()
  // Processor time of the previous and of the latest response, for the present share.
  const measured = useRef<{ before?: Measured; latest?: Measured }>({})
  const isRunning = sandbox?.state === 'running'
  const list = useQuery({
    queryKey: ['processes', id],
    queryFn: async ({ signal }) => {
      const params = { path: { sandboxID: id }, query: { limit: 10_000 } }
      const listed = data(await api.GET('/sandboxes/{sandboxID}/processes', { params, signal }))!
      const seconds = new Map(listed.processes.map((p) => [`${p.pid}.${p.startTicks}`, p.cpuSeconds]))
      measured.current = { before: measured.current.latest, latest: { at: performance.now(), seconds } }
      return listed
    },
    enabled: isRunning && session.mayChange,
    refetchInterval: INTERVAL_MS,
    placeholderData: keepPreviousData,
  })
  if (!session.mayChange)
    return (
      <Empty title="No processes with this key">
        <p>
          Command lines may contain secrets, so their list requires a key of scope <code>create</code> or{' '}
          <code>admin</code>.
        </p>
      </Empty>
    )
  if (sandbox && !isRunning) return <Empty title="The sandbox is not running" />
  if (list.error && !list.data) return <Problem error={list.error} onRetry={() => void list.refetch()} />
  if (!list.data) return <Skeleton rows={8} />
  const share = (process: Process) => shareOf(process, measured.current)
  const ordered = orderProcesses(list.data.processes, filters.q, filters.sort, share)
  const shown = ordered.slice(0, MAX_SHOWN)
  return (
    <div className="stack grow fill-column">
      <div className="filters" role="search">
        <SearchField
          label="Filter processes"
          placeholder="Command, user or id"
          value={filters.q}
          onChange={(q) => update({ q })}
        />
        <select
          className="select"
          aria-label="Order"
          value={filters.sort ?? ''}
          onChange={(e) => update({ sort: e.target.value || undefined })}>
          <option value="">Tree</option>
          <option value="cpu">Most processor</option>
          <option value="memory">Most memory</option>
        </select>
        <span className="muted">
          {shown.length < list.data.total ? `${shown.length} of ` : ''}
          {count(list.data.total, 'process', 'processes')}
        </span>
      </div>
      {list.error && <Problem error={list.error} onRetry={() => void list.refetch()} />}
      {shown.length === 0 ? (
        <Empty title="No process matches" />
      ) : (
        <div className="table-wrap cards-narrow" tabIndex={0} role="region" aria-label="Processes">
          <table className="table">
            <thead>
              <tr>
                <th>Command</th>
                <th className="num">Id</th>
                <th>User</th>
                <th className="wide-only">State</th>
                <th className="num">Processor</th>
                <th className="num wide-only">Time</th>
                <th className="num">Memory</th>
                <th className="wide-only">Started</th>
                <th>
                  <span className="sr-only">Signals</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {shown.map(({ process, depth }) => (
                <tr key={`${process.pid}.${process.startTicks}`}>
                  <td className="name">
                    <code style={{ paddingLeft: INDENT * Math.min(depth, MAX_DEPTH) }}>
                      {visible(process.command || `[${process.name}]`)}
                    </code>
                  </td>
                  <td className="num card-line" data-label="Id">
                    {process.pid}
                  </td>
                  <td className="card-line" data-label="User">
                    {visible(process.user)}
                  </td>
                  <td className="wide-only">{states[process.state] ?? visible(process.state)}</td>
                  <td className="num card-line" data-label="Processor">
                    {share(process).toFixed(1)} %
                  </td>
                  <td className="num wide-only">{duration(process.cpuSeconds)}</td>
                  <td className="num card-line" data-label="Memory">
                    {bytes(process.memoryBytes)}
                  </td>
                  <td className="wide-only">
                    <Time at={process.startedAt} />
                  </td>
                  <td className="actions-cell">
                    {process.pid > 1 && (
                      <Menu
                        label={`Signals to process ${process.pid}`}
                        entries={signals.map(([signal, label]) => ({
                          label: `${label} (${signal})`,
                          icon: 'kill' as const,
                          danger: signal === 'SIGKILL',
                          onSelect: () => setTarget({ process, signal }),
                        }))}
                      />
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      <AsCommand command={commands.processes(id)} />
      {target && (
        <ConfirmDialog
          title={`Send ${target.signal} to process ${target.process.pid}?`}
          label="Send"
          danger={target.signal === 'SIGKILL'}
          command={commands.signal(id, target.process.pid, target.signal)}
          onClose={() => setTarget(undefined)}
          onDone={() => void list.refetch()}
          run={() =>
            api.POST('/sandboxes/{sandboxID}/processes/{pid}/signal', {
              params: { path: { sandboxID: id, pid: String(target.process.pid) } },
              body: { signal: target.signal, startTicks: target.process.startTicks },
            })
          }>
          <p>
            <code>{visible(target.process.command || target.process.name)}</code> of the user{' '}
            {visible(target.process.user)} receives the signal.
          </p>
        </ConfirmDialog>
      )}
    </div>
  )
}
