import { useMemo, useState } from 'react'
import { useNavigate, useParams, useSearch } from '@tanstack/react-router'
import { keepPreviousData, useQuery } from '@tanstack/react-query'
import { api, callJson, data, guestPath } from '../api/client'
import { useRefresh, useSandbox } from '../api/queries'
import { useSession } from '../session'
import { commands } from '../lib/commands'
import { bytes, count } from '../lib/format'
import { visible } from '../lib/visible'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Button, Copy, Empty, Field, Problem, Skeleton, Time } from '../ui/controls'
import { FilterSelect, SearchField } from '../ui/filters'
import { LogLines, ViewCommand } from '../ui/log-lines'

/** Height of a placeholder of a line, in pixels. */
const LINE = 19

function useId(): string {
  return (useParams({ strict: false }) as { id: string }).id
}

/** Shows the last lines of the console, and new lines as they appear. */
export function ConsoleTab() {
  const id = useId()
  const search = useSearch({ strict: false }) as { q?: string }
  const navigate = useNavigate()
  const query = search.q ?? ''
  const [follow, setFollow] = useState(true)
  const logs = useQuery({
    queryKey: ['logs', id],
    queryFn: async ({ signal }) =>
      data(
        await api.GET('/v2/sandboxes/{sandboxID}/logs', {
          params: { path: { sandboxID: id }, query: { limit: 1000 } as never },
          signal,
        }),
      )!.logs,
    refetchInterval: 2000,
  })
  const lines = logs.data ?? []
  const wanted = query.toLowerCase()
  const shown = useMemo(
    () => (wanted ? lines.filter((l) => l.message.toLowerCase().includes(wanted)) : lines),
    [lines, wanted],
  )
  const text = () => lines.map((l) => l.message).join('\n')
  const download = () => {
    const url = URL.createObjectURL(new Blob([text()], { type: 'application/octet-stream' }))
    const link = document.createElement('a')
    link.href = url
    link.download = `${id}-console.txt`
    link.click()
    URL.revokeObjectURL(url)
  }
  if (logs.error && !logs.data) return <Problem error={logs.error} onRetry={() => void logs.refetch()} />
  if (!logs.data) return <Skeleton rows={10} height={LINE} />
  return (
    <div className="stack grow fill-column">
      <div className="filters">
        <SearchField
          label="Search in the console log"
          placeholder="Search"
          value={query}
          onChange={(q) => void navigate({ to: '.', search: { q } as never, replace: true })}
        />
        <span className="muted">
          {wanted ? `${count(shown.length, 'line matches', 'lines match')}` : count(lines.length, 'line')}
        </span>
        <label className="row">
          <input type="checkbox" checked={follow} onChange={(e) => setFollow(e.target.checked)} /> Follow
        </label>
        <span className="grow" />
        <Copy text={text()} label="Copy the log" small={false} />
        <Button icon="download" onClick={download}>
          Download
        </Button>
      </div>
      <p className="muted">
        The last lines of the guest's console. A console has no clock: the times are those at which the daemon read the
        lines.
      </p>
      {lines.length === 0 ? (
        <Empty title="The console has no output" command={`jiffy logs ${id}`} />
      ) : (
        <LogLines
          lines={shown}
          label="Console log"
          isFollowed={follow}
          onLeave={() => setFollow(false)}
          classOf={(line) => line.level}
          draw={(line) => (
            <>
              <time title={line.timestamp}>{line.timestamp.slice(11, 19)}</time>
              {visible(line.message)}
            </>
          )}
        />
      )}
      <ViewCommand command={commands.logs(id)} />
    </div>
  )
}

/** Connections and DNS queries with verdicts. */
export function ConnectionsTab() {
  const id = useId()
  const search = useSearch({ strict: false }) as { q?: string; verdict?: string }
  const navigate = useNavigate()
  const session = useSession()
  const sandbox = useSandbox(id).data
  const refresh = useRefresh()
  const [rule, setRule] = useState<{ kind: 'allow' | 'deny'; host: string }>()
  const list = useQuery({
    queryKey: ['connections', id],
    queryFn: async ({ signal }) =>
      data(
        await api.GET('/sandboxes/{sandboxID}/connections', {
          params: { path: { sandboxID: id }, query: { limit: 1000 } as never },
          signal,
        }),
      )!,
    refetchInterval: 3000,
  })
  if (list.error && !list.data) return <Problem error={list.error} onRetry={() => void list.refetch()} />
  if (!list.data) return <Skeleton rows={8} />
  const wanted = (search.q ?? '').toLowerCase()
  const shown = list.data.connections
    .filter((c) => {
      if (search.verdict && c.verdict !== search.verdict) return false
      return (
        !wanted || `${c.host ?? ''} ${c.address ?? ''}:${c.port ?? ''} ${c.protocol}`.toLowerCase().includes(wanted)
      )
    })
    .reverse()
  const update = (change: Record<string, string | undefined>) =>
    void navigate({ to: '.', search: { ...search, ...change } as never, replace: true })
  const network = sandbox?.network
  // The daemon retains absent fields.
  const changed = (kind: 'allow' | 'deny', host: string) => {
    const allowOut = (network?.allowOut ?? []).filter((h) => h !== host)
    const denyOut = (network?.denyOut ?? []).filter((h) => h !== host)
    if (kind === 'allow') allowOut.push(host)
    else denyOut.push(host)
    return { allowOut, denyOut }
  }
  return (
    <div className="stack grow fill-column">
      <div className="filters">
        <SearchField
          label="Filter connections"
          placeholder="Host, address or port"
          value={search.q}
          onChange={(q) => update({ q })}
        />
        <FilterSelect
          label="Verdict"
          value={search.verdict}
          options={['allowed', 'refused']}
          onChange={(verdict) => update({ verdict })}
        />
        <span className="muted">
          {count(shown.length, 'entry', 'entries')}
          {list.data.missing > 0 && `, ${list.data.missing} more were not recorded`}
        </span>
      </div>
      {list.data.connections.length === 0 ? (
        <Empty title="No connections yet" command={`jiffy logs ${id} --network`}>
          <p>Connections of the guest and its DNS queries appear here with their verdicts.</p>
        </Empty>
      ) : (
        <div className="table-wrap cards-narrow" tabIndex={0} role="region" aria-label="Connections">
          <table className="table">
            <thead>
              <tr>
                <th>Time</th>
                <th>Verdict</th>
                <th>Destination</th>
                <th>Protocol</th>
                <th className="num">Sent</th>
                <th className="num">Received</th>
                <th className="num">Times</th>
                <th>
                  <span className="sr-only">Rules</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {shown.map((c, index) => {
                const target = c.host ?? c.address
                return (
                  <tr key={index}>
                    <td className="card-line">
                      <Time at={c.timestamp} />
                    </td>
                    <td>
                      <span className={`badge ${c.verdict === 'allowed' ? 'good' : 'bad'}`}>
                        {c.verdict}
                        {c.reason ? `: ${c.reason}` : ''}
                      </span>
                    </td>
                    <td className="card-line">
                      {visible(c.host ?? c.address ?? '–')}
                      {c.port != null && `:${c.port}`}
                      {c.host && c.address && <span className="sub">{c.address}</span>}
                      {c.question && <span className="sub">{visible(c.question)}</span>}
                    </td>
                    <td className="wide-only">{visible(c.protocol)}</td>
                    <td className="num wide-only">{bytes(c.bytesOut)}</td>
                    <td className="num wide-only">{bytes(c.bytesIn)}</td>
                    <td className="num wide-only">{c.times}</td>
                    <td className="actions-cell nowrap">
                      {session.mayChange &&
                        target &&
                        c.protocol !== 'dns' &&
                        (c.verdict === 'refused' ? (
                          <Button small look="ghost" onClick={() => setRule({ kind: 'allow', host: target })}>
                            Allow
                          </Button>
                        ) : (
                          c.address && (
                            <Button small look="ghost" onClick={() => setRule({ kind: 'deny', host: c.address ?? '' })}>
                              Deny
                            </Button>
                          )
                        ))}
                    </td>
                  </tr>
                )
              })}
            </tbody>
          </table>
        </div>
      )}
      <ViewCommand command={commands.connections(id)} />
      {rule && (
        <ConfirmDialog
          title={rule.kind === 'allow' ? 'Allow this host?' : 'Deny this address?'}
          label={rule.kind === 'allow' ? 'Allow' : 'Deny'}
          command={commands.network(id, changed(rule.kind, rule.host))}
          onClose={() => setRule(undefined)}
          onDone={refresh}
          run={() =>
            api.PATCH('/sandboxes/{sandboxID}/network', {
              params: { path: { sandboxID: id } },
              body: changed(rule.kind, rule.host),
            })
          }>
          <p>
            <code>{visible(rule.host)}</code> is added to the {rule.kind === 'allow' ? 'allowed' : 'denied'}{' '}
            destinations of this sandbox.
          </p>
        </ConfirmDialog>
      )}
    </div>
  )
}

interface Port {
  port: number
  address: string
}

/** Listening ports, with links that open them at another origin. */
export function PortsTab() {
  const id = useId()
  const session = useSession()
  const sandbox = useSandbox(id).data
  const [port, setPort] = useState('')
  const [ttl, setTtl] = useState('3600')
  const [links, setLinks] = useState<{ port: number; url: string; expiresAt: string }[]>([])
  const [error, setError] = useState<unknown>()
  const ports = useQuery({
    queryKey: ['ports', id],
    queryFn: () => callJson<{ ports: Port[] }>('GET', `${guestPath(id)}/ports`),
    enabled: sandbox?.state === 'running' && session.mayChange,
    refetchInterval: 3000,
    placeholderData: keepPreviousData,
  })
  if (!session.mayChange)
    return (
      <Empty title="No links with this key">
        <p>
          A link permits changes of the sandbox, so it requires a key of scope <code>create</code> or <code>admin</code>
          .
        </p>
      </Empty>
    )
  const create = async (number: number, open: boolean) => {
    setError(undefined)
    try {
      const query = { port: number, ttl: Number(ttl) }
      const params = { path: { sandboxID: id }, query }
      const link = data(await api.GET('/sandboxes/{sandboxID}/preview', { params }))!
      setLinks((all) => [{ port: number, ...link }, ...all.filter((l) => l.port !== number)])
      if (open) window.open(link.url, '_blank', 'noopener,noreferrer')
    } catch (e) {
      setError(e)
    }
  }
  return (
    <div className="stack">
      {ports.error && <Problem error={ports.error} onRetry={() => void ports.refetch()} />}
      {ports.data &&
        (ports.data.ports.length === 0 ? (
          <Empty title="No process listens on a TCP port">
            <p>Servers in the sandbox appear here when they listen.</p>
          </Empty>
        ) : (
          <div className="table-wrap" style={{ flex: 'none' }}>
            <table className="table">
              <thead>
                <tr>
                  <th>Port</th>
                  <th>Address</th>
                  <th>
                    <span className="sr-only">Actions</span>
                  </th>
                </tr>
              </thead>
              <tbody>
                {ports.data.ports.map((p) => (
                  <tr key={`${p.address} ${p.port}`}>
                    <td>
                      <strong>{p.port}</strong>
                    </td>
                    <td>
                      <code>{visible(p.address)}</code>
                    </td>
                    <td className="right">
                      <Button small icon="open" onClick={() => void create(p.port, true)}>
                        Open
                      </Button>
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        ))}
      <form
        className="card"
        onSubmit={(e) => {
          e.preventDefault()
          void create(Number(port), false)
        }}>
        <div className="card-head">
          <h2>Signed link</h2>
        </div>
        <div className="card-body stack">
          <p className="muted">
            A link opens a port without a key until it expires. Its page has an origin of its own and cannot use this
            console.
          </p>
          <div className="row wrap" style={{ alignItems: 'flex-end' }}>
            <Field id="port" label="Port">
              <input
                id="port"
                className="input"
                style={{ width: 110 }}
                type="number"
                min={1}
                max={65535}
                required
                value={port}
                onChange={(e) => setPort(e.target.value)}
              />
            </Field>
            <Field id="ttl" label="Valid for">
              <select id="ttl" className="select" value={ttl} onChange={(e) => setTtl(e.target.value)}>
                <option value="600">10 min</option>
                <option value="3600">1 h</option>
                <option value="86400">1 day</option>
                <option value="604800">7 days</option>
              </select>
            </Field>
            <Button type="submit" disabled={!port}>
              Create a link
            </Button>
          </div>
          {error !== undefined && <Problem error={error} />}
          {links.map((link) => (
            <div key={link.port} className="stack" style={{ gap: 4 }}>
              <div className="code-block">
                <pre tabIndex={0}>{link.url}</pre>
                <Copy text={link.url} />
                <a className="button small" href={link.url} target="_blank" rel="noopener noreferrer">
                  Open
                </a>
              </div>
              <span className="muted">
                Port {link.port}, until <Time at={link.expiresAt} />
              </span>
            </div>
          ))}
        </div>
      </form>
    </div>
  )
}
