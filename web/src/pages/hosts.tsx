import { useState } from 'react'
import { api, CallError, type Schemas } from '../api/client'
import { useFleet } from '../api/queries'
import { useSession } from '../session'
import { sorted, useFilters } from '../lib/filters'
import { count, duration, mib } from '../lib/format'
import { hostCommands } from '../lib/host-commands'
import { visible } from '../lib/visible'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Button, Copy, Empty, Problem, Skeleton } from '../ui/controls'
import { NotPermitted } from '../ui/not-permitted'
import { SortHeading } from '../ui/sort-heading'
import { FilterSelect, SearchField } from '../ui/filters'

type Node = Schemas['FleetNode']

interface Filters {
  q?: string
  state?: string
  sort?: string
}

const looks: Record<string, string> = { up: 'good', draining: 'warn', dead: 'bad', left: '' }

const number = (n: number | null) => n ?? -1

const columns: Record<string, (node: Node) => string | number> = {
  host: (n) => n.id,
  state: (n) => n.state,
  running: (n) => -number(n.running),
  paused: (n) => -number(n.paused),
  memory: (n) => -number(n.freeMemoryMib),
  heartbeat: (n) => n.heartbeatAgeMs ?? Number.MAX_SAFE_INTEGER,
}

export function HostsPage() {
  const session = useSession()
  return (
    <div className="page">
      <header className="page-head">
        <h1>Hosts</h1>
      </header>
      {session.isAdmin ? <Hosts /> : <NotPermitted what="Hosts of the fleet are" scope="admin" />}
    </div>
  )
}

function Hosts() {
  const [filters, update] = useFilters<Filters>()
  const fleet = useFleet(true)
  const info = fleet.data
  const [changing, setChanging] = useState<Node>()
  if (fleet.error instanceof CallError && fleet.error.status === 404)
    return (
      <Empty title="This host belongs to no fleet" command="jiffy fleet init">
        <p>A fleet is a group of hosts with one store, on which sandboxes can move.</p>
      </Empty>
    )
  if (fleet.error && !info) return <Problem error={fleet.error} onRetry={() => void fleet.refetch()} />
  if (!info) return <Skeleton rows={6} height={30} />
  const wanted = (filters.q ?? '').toLowerCase()
  const sort = filters.sort ?? 'host'
  const shown = sorted(
    info.nodes.filter((n) => {
      if (filters.state && n.state !== filters.state) return false
      return `${n.id} ${n.address}`.toLowerCase().includes(wanted)
    }),
    sort,
    columns,
  )
  const silent = info.nodes.filter((n) => n.running == null && n.state !== 'left' && n.state !== 'dead')
  const heading = { sort, onSort: (next: string) => update({ sort: next }) }
  return (
    <>
      {info.warnings.length > 0 && (
        <div className="problem-box" role="alert">
          <strong>{count(info.warnings.length, 'condition needs', 'conditions need')} an operator</strong>
          <pre>{visible(info.warnings.join('\n'))}</pre>
        </div>
      )}
      {info.massSilence && (
        <div className="problem-box" role="alert">
          <strong>More than half of the hosts are silent</strong>
          <pre>
            {info.massSilence.silent} of {info.massSilence.members} hosts do not answer the coordinator. No host is
            declared dead meanwhile.
          </pre>
        </div>
      )}
      {silent.length > 0 && (
        <div className="banner" role="status">
          {silent.map((n) => n.id).join(', ')} did not answer within 1 s. Their sandboxes are not counted.
        </div>
      )}
      <section className="card">
        <div className="card-head">
          <h2>Fleet</h2>
          <span className={`badge ${info.isReady && info.hasAuthority ? 'good' : 'warn'}`}>
            {info.isReady && info.hasAuthority ? 'ready' : 'not ready'}
          </span>
        </div>
        <dl className="facts card-body">
          <dt>Id</dt>
          <dd>
            <code>{info.id}</code> <Copy text={info.id} label="Copy the id" />
          </dd>
          <dt>This host</dt>
          <dd>{info.host}</dd>
          <dt>Coordinator</dt>
          <dd>{info.coordinator ? `${info.coordinator}, term ${info.term ?? '–'}` : 'not known yet'}</dd>
          <dt>Directory</dt>
          <dd>
            {info.isDirectoryComplete ? 'complete' : 'incomplete: sandboxes of some hosts are not known'},{' '}
            {count(info.shards, 'shard')}
          </dd>
          <dt>Stored sandboxes</dt>
          <dd>{info.hasAuthority ? 'this host may resume them' : 'this host may not resume them now'}</dd>
        </dl>
      </section>
      <div className="filters" role="search">
        <SearchField
          label="Filter hosts"
          placeholder="Host or address"
          value={filters.q}
          onChange={(q) => update({ q })}
        />
        <FilterSelect
          label="State"
          value={filters.state}
          options={Object.keys(looks)}
          onChange={(state) => update({ state })}
        />
        <span className="muted">{count(shown.length, 'host')}</span>
      </div>
      <div className="table-wrap cards-narrow whole" tabIndex={0} role="region" aria-label="Hosts">
        <table className="table">
          <thead>
            <tr>
              <SortHeading id="host" label="Host" {...heading} />
              <SortHeading id="state" label="State" {...heading} />
              <th>Address</th>
              <SortHeading id="running" label="Running" isNumber {...heading} />
              <SortHeading id="paused" label="Paused" isNumber {...heading} />
              <th className="num">Not stored</th>
              <th className="num wide-only">Warm</th>
              <SortHeading id="memory" label="Free memory" isNumber {...heading} />
              <SortHeading id="heartbeat" label="Heartbeat" isNumber isWide {...heading} />
              <th className="wide-only">Version</th>
              <th>
                <span className="sr-only">Actions</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {shown.map((n) => (
              <tr key={n.id}>
                <td className="name">
                  <strong>{n.id}</strong>
                  {n.id === info.host && <span className="sub">this host</span>}
                  {n.id === info.coordinator && <span className="sub">coordinator</span>}
                </td>
                <td>
                  <span className={`badge ${looks[n.state] ?? ''}`}>{n.state}</span>
                </td>
                <td className="card-line" data-label="Address">
                  <code>{visible(n.address)}</code>
                </td>
                <td className="num card-line" data-label="Running">
                  {n.running ?? '–'}
                </td>
                <td className="num card-line" data-label="Paused">
                  {n.paused ?? '–'}
                </td>
                <td className="num card-line" data-label="Not stored">
                  {n.unstored ?? '–'}
                </td>
                <td className="num wide-only">{n.warm ?? '–'}</td>
                <td className="num card-line" data-label="Free memory">
                  {mib(n.freeMemoryMib)}
                </td>
                <td className="num wide-only">
                  {n.heartbeatAgeMs == null ? '–' : `${duration(n.heartbeatAgeMs / 1000)} ago`}
                </td>
                <td className="wide-only">{visible(n.version)}</td>
                <td className="actions-cell">
                  {(n.state === 'up' || n.state === 'draining') && (
                    <Button small look="ghost" onClick={() => setChanging(n)}>
                      {n.state === 'up' ? 'Drain' : 'Undrain'}
                    </Button>
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p className="muted">Paused sandboxes that are not stored are lost together with their host.</p>
      {changing?.state === 'up' && (
        <DrainDialog host={changing.id} onDone={() => void fleet.refetch()} onClose={() => setChanging(undefined)} />
      )}
      {changing?.state === 'draining' && (
        <ConfirmDialog
          title={`Place sandboxes on ${changing.id} again?`}
          label="Undrain"
          command={hostCommands.undrain(changing.id)}
          run={() => api.POST('/fleet/nodes/{host}/undrain', { params: { path: { host: changing.id } } })}
          onDone={() => void fleet.refetch()}
          onClose={() => setChanging(undefined)}>
          <p>New sandboxes are placed on this host again.</p>
        </ConfirmDialog>
      )}
    </>
  )
}

/** Confirms a drain. */
function DrainDialog({ host, onDone, onClose }: { host: string; onDone: () => void; onClose: () => void }) {
  const [force, setForce] = useState(false)
  return (
    <ConfirmDialog
      title={`Drain ${host}?`}
      label="Drain"
      danger={force}
      command={hostCommands.drain(host, force)}
      run={() => api.POST('/fleet/nodes/{host}/drain', { params: { path: { host } }, body: { wait: false, force } })}
      onDone={onDone}
      onClose={onClose}>
      <p>No more sandboxes are placed on this host, and its paused sandboxes resume on other hosts.</p>
      <label className="row">
        <input type="checkbox" checked={force} onChange={(e) => setForce(e.target.checked)} />
        Also pause its running sandboxes and store them, so that they resume on other hosts
      </label>
    </ConfirmDialog>
  )
}
