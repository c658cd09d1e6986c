import { useMemo } from 'react'
import { Link } from '@tanstack/react-router'
import { useQuery } from '@tanstack/react-query'
import { api, data } from '../api/client'
import { useEngines, useHost, useLimits, useSandboxes } from '../api/queries'
import { useSession } from '../session'
import { bytes, count, duration, mib } from '../lib/format'
import { visible } from '../lib/visible'
import { Meter, Problem, Skeleton } from '../ui/controls'
import { EventList } from '../ui/event-list'

export function OverviewPage() {
  const session = useSession()
  return (
    <div className="page">
      <header className="page-head">
        <h1>Overview</h1>
      </header>
      <States />
      {session.scope === 'create' ? <Budget /> : <Host />}
      <section className="card">
        <div className="card-head">
          <h2>Events of the last hour</h2>
        </div>
        <EventList />
      </section>
    </div>
  )
}

function Figure({
  label,
  value,
  detail,
  used,
  total,
}: {
  label: string
  value: string
  detail?: string
  used?: number
  total?: number
}) {
  return (
    <div className="card figure">
      <span className="label">{label}</span>
      <span className="value">{value}</span>
      {used !== undefined && total !== undefined && total > 0 && <Meter used={used} total={total} label={label} />}
      {detail && <span className="label">{detail}</span>}
    </div>
  )
}

function States() {
  const list = useSandboxes()
  const session = useSession()
  const counts = useMemo(() => {
    const found = new Map<string, number>()
    const keys = new Map<string, number>()
    for (const s of list.data ?? []) {
      found.set(s.state, (found.get(s.state) ?? 0) + 1)
      const owner = s.jiffy.terms.owner ?? 'owner'
      keys.set(owner, (keys.get(owner) ?? 0) + 1)
    }
    return { states: found, keys: [...keys].sort((a, b) => b[1] - a[1]) }
  }, [list.data])
  if (list.error && !list.data) return <Problem error={list.error} onRetry={() => void list.refetch()} />
  if (!list.data) return <Skeleton rows={1} height={86} />
  return (
    <>
      <div className="cards states">
        {(['running', 'paused', 'broken', 'creating'] as const).map((state) => (
          <Link key={state} to="/sandboxes" search={{ state }} className="card figure link-card">
            <span className="label">{state}</span>
            <span className="value">{(counts.states.get(state) ?? 0).toLocaleString()}</span>
          </Link>
        ))}
      </div>
      {session.isAdmin && counts.keys.length > 1 && (
        <section className="card">
          <div className="card-head">
            <h2>Sandboxes by key</h2>
          </div>
          <dl className="facts card-body">
            {counts.keys.slice(0, 20).map(([key, n]) => (
              <div key={key} style={{ display: 'contents' }}>
                <dt>
                  <Link to="/sandboxes" search={{ key }}>
                    <code>{key}</code>
                  </Link>
                </dt>
                <dd>{count(n, 'sandbox', 'sandboxes')}</dd>
              </div>
            ))}
          </dl>
        </section>
      )}
    </>
  )
}

function Host() {
  const session = useSession()
  const host = useHost()
  const engines = useEngines()
  const pools = useQuery({
    queryKey: ['pools'],
    queryFn: async ({ signal }) => data(await api.GET('/pools', { signal }))!,
    refetchInterval: 5000,
    enabled: session.isAdmin,
  })
  const h = host.data
  if (host.error && !h) return <Problem error={host.error} onRetry={() => void host.refetch()} />
  if (!h) return <Skeleton rows={4} height={86} />
  const status = h.jiffy
  const memoryUsed =
    h.memoryTotalMB != null && h.memoryAvailableMB != null ? h.memoryTotalMB - h.memoryAvailableMB : undefined
  const diskUsed = h.diskTotalMB != null && h.diskFreeMB != null ? h.diskTotalMB - h.diskFreeMB : undefined
  return (
    <>
      <div className="cards">
        <Figure
          label="Memory of the host"
          value={mib(memoryUsed)}
          detail={`of ${mib(h.memoryTotalMB)}, ${mib(h.memoryAvailableMB)} available`}
          used={memoryUsed}
          total={h.memoryTotalMB ?? undefined}
        />
        {status && (
          <Figure
            label="Memory promised to guests"
            value={mib(status.memory_committed_mib)}
            detail={`of ${mib(status.memory_limit_mib)}`}
            used={status.memory_committed_mib}
            total={status.memory_limit_mib ?? undefined}
          />
        )}
        <Figure
          label="Disk"
          value={mib(diskUsed)}
          detail={`of ${mib(h.diskTotalMB)}, ${mib(h.diskFreeMB)} free`}
          used={diskUsed}
          total={h.diskTotalMB ?? undefined}
        />
        <Figure label="Warm pool" value={count(h.warm, 'guest')} detail="restored in advance" />
      </div>
      <div className="cards wide-cards">
        <section className="card">
          <div className="card-head">
            <h2>Daemon</h2>
          </div>
          <dl className="facts card-body">
            <dt>Version</dt>
            <dd>{h.version}</dd>
            <dt>Process</dt>
            <dd>{h.pid}</dd>
            {status && (
              <>
                <dt>Uptime</dt>
                <dd>{duration(status.uptime_s)}</dd>
                <dt>Address</dt>
                <dd>{status.listen ?? 'socket only'}</dd>
                <dt>Snapshots</dt>
                <dd>{status.snapshots.toLocaleString()}</dd>
              </>
            )}
            <dt>Network</dt>
            <dd>{h.network}</dd>
            {status?.rootless && (
              <>
                <dt>Isolation</dt>
                <dd>{status.rootless}</dd>
              </>
            )}
            {status && Object.keys(status.refused).length > 0 && (
              <>
                <dt>Rejected</dt>
                <dd>
                  {Object.entries(status.refused)
                    .map(([reason, n]) => `${n} for ${reason}`)
                    .join(', ')}
                </dd>
              </>
            )}
          </dl>
        </section>
        <section className="card">
          <div className="card-head">
            <h2>Engines</h2>
          </div>
          <div className="card-body stack">
            {engines.data?.map((e) => (
              <div key={e.name} className="row wrap">
                <span className={`badge ${e.usable ? 'good' : 'bad'}`}>{e.name}</span>
                <span className="muted">
                  {e.version ?? ''}
                  {e.default ? ', default' : ''}
                  {e.why ? `: ${visible(e.why)}` : ''}
                </span>
              </div>
            ))}
          </div>
        </section>
        {pools.data && (
          <section className="card">
            <div className="card-head">
              <h2>Pools</h2>
            </div>
            <dl className="facts card-body">
              {pools.data.length === 0 && <dd className="muted">No pool has a fixed size</dd>}
              {pools.data.map((p) => (
                <div key={p.templateID} style={{ display: 'contents' }}>
                  <dt>{visible(p.templateID)}</dt>
                  <dd>
                    {p.ready} of {p.size} ready
                  </dd>
                </div>
              ))}
            </dl>
          </section>
        )}
      </div>
    </>
  )
}

/** Use and limits of the session's key. */
export function Budget() {
  const limits = useLimits()
  const l = limits.data
  if (limits.error && !l) return <Problem error={limits.error} onRetry={() => void limits.refetch()} />
  if (!l) return <Skeleton rows={4} height={86} />
  const rows: [string, number, number | null, (n: number) => string][] = [
    ['Running sandboxes', l.used.sandboxes, l.limits.sandboxes ?? null, String],
    ['Processors', l.used.vcpus, l.limits.vcpus ?? null, String],
    ['Memory', l.used.memoryMB, l.limits.memoryMB ?? null, mib],
    ['Paused sandboxes', l.used.paused, l.limits.paused ?? null, String],
    ['Snapshots', l.used.snapshots, l.limits.snapshots ?? null, String],
    ['Templates', l.used.templates, l.limits.templates ?? null, String],
    ['Builds', l.used.builds, l.limits.builds ?? null, String],
    ['Disk', l.used.diskBytes, l.limits.diskBytes ?? null, bytes],
  ]
  return (
    <div className="cards">
      {rows.map(([label, used, limit, format]) => (
        <Figure
          key={label}
          label={label}
          value={format(used)}
          detail={limit === null ? 'no limit' : `of ${format(limit)}`}
          used={limit === null ? undefined : used}
          total={limit ?? undefined}
        />
      ))}
    </div>
  )
}
