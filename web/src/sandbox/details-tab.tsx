import { useState } from 'react'
import { Link, useParams } from '@tanstack/react-router'
import { api } from '../api/client'
import { useFigures, useRefresh, useSandbox } from '../api/queries'
import { useSession } from '../session'
import { commands } from '../lib/commands'
import { bytes, deadlineOf, duration, mib } from '../lib/format'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { Button, CopyId, Field, Problem, Skeleton, Time } from '../ui/controls'
import { EventList } from '../ui/event-list'
import { notify } from '../ui/toast'

/** Everything that `jiffy inspect` shows, and the network rules. */
export function DetailsTab() {
  const { id } = useParams({ strict: false }) as { id: string }
  const sandbox = useSandbox(id).data
  const figures = useFigures(sandbox?.state === 'running' ? [id] : [])[id]
  if (!sandbox) return <Skeleton rows={8} />
  const info = sandbox.jiffy
  const env = Object.entries(info.env)
  const deadline = deadlineOf(info.deadline_ms)
  const facts: [string, React.ReactNode][] = [
    ['Id', <CopyId key="id" id={sandbox.sandboxID} />],
    ['Template', visible(sandbox.alias)],
    ['Created', <Time key="c" at={info.created_ms} />],
    ['State since', <Time key="s" at={info.changed_ms} />],
    ['Started by', info.boot_mode ?? '–'],
    ['Start time', info.boot_ms == null ? '–' : `${info.boot_ms.toFixed(1)} ms`],
    ['Engine', info.engine ?? '–'],
    [
      'Snapshot',
      info.snapshot ? (
        <Link key="l" to="/lineage" search={{ of: sandbox.sandboxID, at: info.snapshot }}>
          <code>{info.snapshot}</code>
        </Link>
      ) : (
        '–'
      ),
    ],
    [
      'Forked from',
      info.forked_from ? (
        <Link key="f" to="/sandboxes/$id" params={{ id: info.forked_from }}>
          <code>{info.forked_from}</code>
        </Link>
      ) : (
        '–'
      ),
    ],
    ['Key', info.terms.owner ? <code key="k">{info.terms.owner}</code> : 'owner of the host'],
    ['Timeout', deadline === null ? 'none' : <Time key="t" at={deadline} />],
    ['At the timeout', info.terms.on_timeout],
    ['Idle timeout', info.terms.idle_timeout_s ? duration(info.terms.idle_timeout_s) : 'none'],
    ['Resume on request', info.terms.auto_resume ? 'yes' : 'no'],
    ['Agent token', info.terms.secure ? 'required' : 'not required'],
    ['Store', sandbox.storeState ?? '–'],
  ]
  const sizes: [string, string][] = [
    [
      'Processors',
      figures ? `${(figures.cpuUsedPct / 100).toFixed(2)} of ${sandbox.cpuCount}` : String(sandbox.cpuCount),
    ],
    [
      'Memory',
      figures
        ? `${bytes(figures.memUsed)} of ${mib(sandbox.memoryMB)}, ${bytes(figures.memCache)} cache`
        : mib(sandbox.memoryMB),
    ],
    ['Disk', figures ? `${bytes(figures.diskUsed)} of ${mib(sandbox.diskSizeMB)}` : mib(sandbox.diskSizeMB)],
    [
      'Network',
      figures?.netBytesIn !== undefined && figures.netBytesOut !== undefined
        ? `${bytes(figures.netBytesIn)} received, ${bytes(figures.netBytesOut)} sent`
        : '–',
    ],
  ]
  return (
    <div className="details">
      <section className="card">
        <div className="card-head">
          <h2>Sandbox</h2>
        </div>
        <dl className="facts card-body">
          {facts.map(([name, value]) => (
            <Fact key={name} name={name}>
              {value}
            </Fact>
          ))}
        </dl>
      </section>
      <div className="stack">
        <section className="card">
          <div className="card-head">
            <h2>Sizes</h2>
          </div>
          <dl className="facts card-body">
            {sizes.map(([name, value]) => (
              <Fact key={name} name={name}>
                {value}
              </Fact>
            ))}
          </dl>
        </section>
        <section className="card">
          <div className="card-head">
            <h2>Metadata</h2>
          </div>
          <div className="card-body">
            {Object.keys(sandbox.metadata).length === 0 ? (
              <span className="muted">None</span>
            ) : (
              <dl className="facts">
                {Object.entries(sandbox.metadata).map(([k, v]) => (
                  <Fact key={k} name={visible(k)}>
                    {visible(v)}
                  </Fact>
                ))}
              </dl>
            )}
          </div>
        </section>
        {env.length > 0 && <EnvironmentCard env={env} />}
      </div>
      <NetworkCard key={sandbox.sandboxID} id={id} />
      <section className="card">
        <div className="card-head">
          <h2>Events</h2>
        </div>
        <EventList sandbox={sandbox.sandboxID} />
      </section>
    </div>
  )
}

function Fact({ name, children }: { name: string; children: React.ReactNode }) {
  return (
    <>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </>
  )
}

function EnvironmentCard({ env }: { env: [string, string][] }) {
  const [shown, setShown] = useState(false)
  return (
    <section className="card">
      <div className="card-head">
        <h2>Environment</h2>
        <Button small onClick={() => setShown(!shown)} aria-pressed={shown}>
          {shown ? 'Hide values' : 'Show values'}
        </Button>
      </div>
      <dl className="facts card-body">
        {env.map(([k, v]) => (
          <Fact key={k} name={visible(k)}>
            <code>{shown ? visible(v) : '••••••'}</code>
          </Fact>
        ))}
      </dl>
    </section>
  )
}

const lines = (text: string) => text.split(/[\s,]+/).filter(Boolean)

/**
 * The network rules. Saving changes the fields of the form only: the daemon retains all others, for
 * example headers and the credentials of an egress proxy, which are not known here.
 */
function NetworkCard({ id }: { id: string }) {
  const sandbox = useSandbox(id).data
  const session = useSession()
  const refresh = useRefresh()
  const [edit, setEdit] = useState<{ allow: string; deny: string; internet: boolean }>()
  const [error, setError] = useState<unknown>()
  const [busy, setBusy] = useState(false)
  if (!sandbox) return null
  const { network } = sandbox
  const hasInternet = sandbox.allowInternetAccess !== false
  const body = edit && {
    allowOut: lines(edit.allow),
    denyOut: lines(edit.deny),
    allow_internet_access: edit.internet,
  }
  const save = async () => {
    if (!body) return
    setBusy(true)
    setError(undefined)
    try {
      await api.PATCH('/sandboxes/{sandboxID}/network', { params: { path: { sandboxID: id } }, body })
      notify('The network rules are in force')
      refresh()
      setEdit(undefined)
    } catch (e) {
      setError(e)
    } finally {
      setBusy(false)
    }
  }
  return (
    <section className="card">
      <div className="card-head">
        <h2>Network rules</h2>
        {session.mayChange && !edit && (
          <Button
            small
            icon="edit"
            onClick={() =>
              setEdit({
                allow: (network?.allowOut ?? []).join('\n'),
                deny: (network?.denyOut ?? []).join('\n'),
                internet: hasInternet,
              })
            }>
            Edit
          </Button>
        )}
      </div>
      <div className="card-body stack">
        {!edit && (
          <dl className="facts">
            <Fact name="Internet">{hasInternet ? 'yes' : 'no'}</Fact>
            <Fact name="Allowed">
              {network?.allowOut.length
                ? network.allowOut.map((h) => (
                    <code key={h} className="tag">
                      {visible(h)}
                    </code>
                  ))
                : 'no rule'}
            </Fact>
            <Fact name="Denied">
              {network?.denyOut.length
                ? network.denyOut.map((h) => (
                    <code key={h} className="tag">
                      {visible(h)}
                    </code>
                  ))
                : 'no rule'}
            </Fact>
            <Fact name="Name servers">
              {network?.dnsServers.length ? network.dnsServers.join(', ') : 'of the host'}
            </Fact>
            {network?.egressMbps != null && <Fact name="Bandwidth">{network.egressMbps} Mbit/s</Fact>}
            {Object.keys(network?.rules ?? {}).length > 0 && (
              <Fact name="Headers">
                {Object.keys(network?.rules ?? {}).map((host) => (
                  <code key={host} className="tag">
                    {visible(host)}
                  </code>
                ))}
              </Fact>
            )}
            {network?.egressProxy && <Fact name="Egress proxy">{visible(network.egressProxy.address)}</Fact>}
            {network?.join && <Fact name="Private network">{visible(`${network.join}, as ${network.address}`)}</Fact>}
            <Fact name="Ports">{network?.allowPublicTraffic === false ? 'require the traffic token' : 'public'}</Fact>
          </dl>
        )}
        {edit && (
          <>
            <label className="row">
              <input
                type="checkbox"
                checked={edit.internet}
                onChange={(e) => setEdit({ ...edit, internet: e.target.checked })}
              />{' '}
              Internet access
            </label>
            <Field id="allow" label="Allowed destinations" hint="Host names, addresses or networks, one per line">
              <textarea
                id="allow"
                className="textarea mono"
                value={edit.allow}
                onChange={(e) => setEdit({ ...edit, allow: e.target.value })}
              />
            </Field>
            <Field id="deny" label="Denied destinations" hint="0.0.0.0/0 denies all that is not allowed">
              <textarea
                id="deny"
                className="textarea mono"
                value={edit.deny}
                onChange={(e) => setEdit({ ...edit, deny: e.target.value })}
              />
            </Field>
            {error !== undefined && <Problem error={error} />}
            {body && <AsCommand command={commands.network(id, body)} />}
            <div className="row">
              <Button look="primary" busy={busy} onClick={() => void save()}>
                Save
              </Button>
              <Button onClick={() => setEdit(undefined)}>Cancel</Button>
            </div>
          </>
        )}
      </div>
    </section>
  )
}
