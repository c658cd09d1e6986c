import { useState } from 'react'
import { Link, useNavigate, useParams } from '@tanstack/react-router'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { api, CallError, data, messageOf, type Schemas } from '../api/client'
import { useSession } from '../session'
import { useFilters } from '../lib/filters'
import { functionCommands } from '../lib/function-commands'
import { bytes, count, duration } from '../lib/format'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Button, Copy, Dialog, Empty, Menu, Meter, Problem, Skeleton, Time } from '../ui/controls'
import { notify } from '../ui/toast'
import { DeployDialog } from './deploy'
import { FunctionLog } from './function-log'
import { TestRequest } from './function-test'
import { RemoveFunction } from './functions'

type Fn = Schemas['Function']

const tabs = [
  ['details', 'Details'],
  ['versions', 'Versions'],
  ['log', 'Log'],
  ['test', 'Test request'],
] as const

export function FunctionPage() {
  const { name } = useParams({ strict: false }) as { name: string }
  const [search] = useFilters<{ tab?: string }>()
  const tab = search.tab ?? 'details'
  const query = useQuery({
    queryKey: ['function', name],
    queryFn: async ({ signal }) => data(await api.GET('/functions/{name}', { params: { path: { name } }, signal }))!,
    refetchInterval: 3000,
  })
  const fn = query.data
  if (query.error instanceof CallError && query.error.status === 404)
    return (
      <div className="page">
        <Empty isPage title={fn ? 'This function was removed' : 'This function does not exist'}>
          <p className="muted">{visible(query.error.message)}</p>
          <Link className="button" to="/functions">
            All functions
          </Link>
        </Empty>
      </div>
    )
  if (query.error && !fn)
    return (
      <div className="page">
        <Problem error={query.error} onRetry={() => void query.refetch()} />
      </div>
    )
  if (!fn)
    return (
      <div className="page">
        <Skeleton rows={8} />
      </div>
    )
  return (
    <div className="page fill">
      <Header fn={fn} />
      <nav className="tabs" aria-label="Tabs of the function">
        {tabs.map(([id, label]) => (
          <Link
            key={id}
            to="/functions/$name"
            params={{ name }}
            search={{ tab: id === 'details' ? undefined : id }}
            className={`tab ${tab === id ? 'current' : 'plain'}`}
            aria-current={tab === id ? 'page' : undefined}>
            {label}
          </Link>
        ))}
      </nav>
      <div className="tab-body">
        {tab === 'details' && <Details fn={fn} />}
        {tab === 'versions' && <Versions fn={fn} />}
        {tab === 'log' && <FunctionLog name={fn.name} />}
        {tab === 'test' && <TestRequest fn={fn} />}
      </div>
    </div>
  )
}

function Header({ fn }: { fn: Fn }) {
  const session = useSession()
  const queries = useQueryClient()
  const navigate = useNavigate()
  const [dialog, setDialog] = useState<'deploy' | 'remove' | 'commands'>()
  const [busy, setBusy] = useState(false)
  const close = () => setDialog(undefined)
  const params = { path: { name: fn.name } }
  const isEnabled = fn.state === 'enabled'
  const toggle = async () => {
    setBusy(true)
    try {
      if (isEnabled) await api.POST('/functions/{name}/disable', { params })
      else await api.POST('/functions/{name}/enable', { params })
      await queries.invalidateQueries({ queryKey: ['function', fn.name] })
    } catch (error) {
      notify(messageOf(error), true)
    } finally {
      setBusy(false)
    }
  }
  return (
    <header className="page-head">
      <Link to="/functions" className="muted">
        Functions
      </Link>
      <span className="muted" aria-hidden="true">
        /
      </span>
      <h1 className="truncate">{visible(fn.name)}</h1>
      <span className={`badge ${isEnabled ? 'good' : ''}`}>{fn.state}</span>
      <span className="muted">version {fn.version}</span>
      {session.mayChange && (
        <div className="actions">
          <Button look="primary" icon="upload" onClick={() => setDialog('deploy')}>
            Deploy
          </Button>
          <Button icon={isEnabled ? 'pause' : 'play'} busy={busy} onClick={() => void toggle()}>
            {isEnabled ? 'Disable' : 'Enable'}
          </Button>
          <Menu
            label="More actions"
            entries={[
              { label: 'As commands', icon: 'command', onSelect: () => setDialog('commands') },
              'line',
              { label: 'Remove', icon: 'trash', danger: true, onSelect: () => setDialog('remove') },
            ]}
          />
        </div>
      )}
      {dialog === 'deploy' && <DeployDialog fn={fn} onClose={close} onDone={() => {}} />}
      {dialog === 'remove' && (
        <RemoveFunction name={fn.name} onClose={close} onDone={() => void navigate({ to: '/functions' })} />
      )}
      {dialog === 'commands' && (
        <Dialog title="Commands" wide onClose={close}>
          <div className="field">
            <span className="label">Disable</span>
            <AsCommand command={functionCommands.disable(fn.name)} />
          </div>
          <div className="field">
            <span className="label">Enable</span>
            <AsCommand command={functionCommands.enable(fn.name)} />
          </div>
        </Dialog>
      )}
    </header>
  )
}

const ms = (us: number) => `${(us / 1000).toLocaleString(undefined, { maximumSignificantDigits: 3 })} ms`

function Details({ fn }: { fn: Fn }) {
  const m = fn.metrics
  const buckets = m?.latencyBuckets.filter((b) => b.count > 0) ?? []
  const facts: [string, React.ReactNode][] = [
    ['Requests with a key', <code key="p">{visible(fn.path)}</code>],
    ...(fn.url ? [['Address', <LinkTo key="u" url={fn.url} />] as [string, React.ReactNode]] : []),
    ...(fn.directUrl ? [['Direct address', <LinkTo key="d" url={fn.directUrl} />] as [string, React.ReactNode]] : []),
    ['Access', fn.public ? 'public' : 'with a key'],
    ['World', visible(fn.world ?? '–')],
    ['Module', fn.digest ? <code key="m">{fn.digest}</code> : '–'],
    ['Memory', `${fn.limits.memoryMB} MiB`],
    ['Processor time', `${fn.limits.cpuMs} ms`],
    ['Duration', `${fn.limits.timeoutMs / 1000} s`],
    ['Simultaneous requests', String(fn.limits.concurrency)],
    ['Environment', fn.envNames.length ? visible(fn.envNames.join(', ')) : 'none'],
    ['Allowed hosts', fn.allow.length ? visible(fn.allow.join(', ')) : 'none'],
    ['Sandbox key', fn.sandboxKey ?? 'none'],
    ['Created', <Time key="c" at={fn.createdAt} />],
    ['Changed', <Time key="t" at={fn.updatedAt} />],
  ]
  return (
    <div className="details">
      <section className="card">
        <div className="card-head">
          <h2>Function</h2>
        </div>
        <dl className="facts card-body">
          {facts.map(([label, value]) => (
            <Fact key={label} label={label}>
              {value}
            </Fact>
          ))}
        </dl>
      </section>
      <div className="stack">
        {m && (
          <section className="card">
            <div className="card-head">
              <h2>Requests since the start of the daemon</h2>
            </div>
            <div className="card-body stack">
              <dl className="facts">
                <Fact label="Completed">{m.requests.toLocaleString()}</Fact>
                <Fact label="In flight">{m.running.toLocaleString()}</Fact>
                <Fact label="Mean duration">{m.requests > 0 ? ms(m.latencyUs / m.requests) : '–'}</Fact>
                <Fact label="Mean processor time">{m.requests > 0 ? ms(m.cpuUs / m.requests) : '–'}</Fact>
                {Object.entries(m.faults).map(([fault, n]) => (
                  <Fact key={fault} label={fault}>
                    {count(n, 'failure')}
                  </Fact>
                ))}
              </dl>
              {buckets.length > 0 && (
                <ul className="uses" aria-label="Requests by duration">
                  {buckets.map((b) => (
                    <li key={b.leUs ?? 'rest'}>
                      <span>{b.leUs == null ? 'longer' : `up to ${ms(b.leUs)}`}</span>
                      <span className="muted">{b.count.toLocaleString()}</span>
                      <Meter
                        used={b.count}
                        total={m.requests}
                        label={b.leUs == null ? 'longer' : `up to ${ms(b.leUs)}`}
                      />
                    </li>
                  ))}
                </ul>
              )}
            </div>
          </section>
        )}
        {fn.schedule && (
          <section className="card">
            <div className="card-head">
              <h2>Schedule</h2>
            </div>
            <dl className="facts card-body">
              <Fact label="Cron">
                <code>{visible(fn.schedule.cron)}</code>
              </Fact>
              <Fact label="Next request">
                <Time at={fn.schedule.nextAt} />
              </Fact>
              <Fact label="Last request">
                <Time at={fn.schedule.lastAt} />
                {fn.schedule.lastStatus != null && `, status ${fn.schedule.lastStatus}`}
              </Fact>
              <Fact label="Skipped">{fn.schedule.skipped}</Fact>
              <Fact label="Missed">{fn.schedule.missed}</Fact>
            </dl>
          </section>
        )}
      </div>
    </div>
  )
}

function LinkTo({ url }: { url: string }) {
  const isWeb = /^https?:\/\//.test(url)
  return (
    <span className="copy-id">
      {isWeb ? (
        <a href={url} target="_blank" rel="noopener noreferrer">
          {visible(url)}
        </a>
      ) : (
        visible(url)
      )}
      <Copy text={url} />
    </span>
  )
}

function Fact({ label, children }: { label: string; children: React.ReactNode }) {
  return (
    <>
      <dt>{label}</dt>
      <dd>{children}</dd>
    </>
  )
}

function Versions({ fn }: { fn: Fn }) {
  const session = useSession()
  const queries = useQueryClient()
  const [target, setTarget] = useState<number>()
  const params = { path: { name: fn.name } }
  const list = useQuery({
    queryKey: ['function', fn.name, 'versions', fn.version],
    queryFn: async ({ signal }) => data(await api.GET('/functions/{name}/versions', { params, signal }))!,
  })
  if (list.error && !list.data) return <Problem error={list.error} onRetry={() => void list.refetch()} />
  if (!list.data) return <Skeleton rows={4} height={30} />
  return (
    <div className="table-wrap cards-narrow whole" tabIndex={0} role="region" aria-label="Versions">
      <table className="table">
        <thead>
          <tr>
            <th>Version</th>
            <th>State</th>
            <th className="num">Size</th>
            <th>World</th>
            <th>Module</th>
            <th>Deployed</th>
            <th>
              <span className="sr-only">Actions</span>
            </th>
          </tr>
        </thead>
        <tbody>
          {list.data.map((v) => (
            <tr key={v.version}>
              <td className="name">
                <strong>{v.version}</strong>
              </td>
              <td>{v.answers ? <span className="badge good">active</span> : <span className="muted">earlier</span>}</td>
              <td className="num card-line" data-label="Size">
                {bytes(v.bytes)}
              </td>
              <td className="card-line" data-label="World">
                {visible(v.world)}
              </td>
              <td className="card-line" title={v.digest} data-label="Module">
                <code>{v.digest.slice(0, 12)}</code>
              </td>
              <td className="card-line" data-label="Deployed">
                <Time at={v.createdAt} /> <span className="sub">{age(v.createdAt)}</span>
              </td>
              <td className="actions-cell">
                {session.mayChange && !v.answers && (
                  <Button small icon="back" onClick={() => setTarget(v.version)}>
                    Roll back
                  </Button>
                )}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {target !== undefined && (
        <ConfirmDialog
          title={`Roll back to version ${target}?`}
          label="Roll back"
          command={functionCommands.rollBack(fn.name, target)}
          onClose={() => setTarget(undefined)}
          onDone={() => void queries.invalidateQueries({ queryKey: ['function', fn.name] })}
          run={() => api.POST('/functions/{name}/rollback', { params, body: { version: target } })}>
          New requests run version {target}. Requests in flight finish with version {fn.version}.
        </ConfirmDialog>
      )}
    </div>
  )
}

const age = (at: string) => `${duration((Date.now() - Date.parse(at)) / 1000)} ago`
