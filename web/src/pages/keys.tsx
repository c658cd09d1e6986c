import { useState } from 'react'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { api, callJson, data } from '../api/client'
import { useSession } from '../session'
import { count, duration } from '../lib/format'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { Button, CodeBlock, Field, Problem, Skeleton, Time } from '../ui/controls'
import { Budget } from './overview'
import { ConfirmDialog } from './sandbox'

interface SessionInfo {
  id: string
  keyID: string | null
  createdMs: number
  usedMs: number
  address: string
  browser: string
  isCurrent: boolean
}

/** Shortens a `User-Agent` to the browser and the system. */
function browserName(text: string): string {
  const browser = /(Firefox|Edg|OPR|Chrome|Safari)\/(\d+)/.exec(text)
  const system = /\((?:X11; )?(Windows|Macintosh|Linux|Android|iPhone|iPad)/.exec(text)
  const names: Record<string, string> = { Edg: 'Edge', OPR: 'Opera' }
  return browser?.[1] ? `${names[browser[1]] ?? browser[1]} ${browser[2]}${system ? `, ${system[1]}` : ''}` : text
}

export function KeysPage() {
  const session = useSession()
  return (
    <div className="page">
      <header className="page-head">
        <h1>Keys and sessions</h1>
      </header>
      {session.keyID && (
        <>
          <h2>Use of this key</h2>
          <Budget />
        </>
      )}
      <Sessions />
      {session.isAdmin && <Revoke />}
      <section className="card">
        <div className="card-head">
          <h2>Keys on the command line</h2>
        </div>
        <div className="card-body stack">
          <p className="muted">Keys are created on the host, where the secret is shown once.</p>
          {[
            'jiffy key create --name ci --scope create --max-sandboxes 20',
            'jiffy key ls',
            'jiffy key rotate ci --overlap 1h',
          ].map((c) => (
            <CodeBlock key={c} text={c} />
          ))}
        </div>
      </section>
    </div>
  )
}

function Sessions() {
  const queries = useQueryClient()
  const [error, setError] = useState<unknown>()
  const list = useQuery({
    queryKey: ['sessions'],
    queryFn: () => callJson<SessionInfo[]>('GET', '/sessions'),
    refetchInterval: 5000,
  })
  const end = async (id: string) => {
    setError(undefined)
    try {
      await callJson('DELETE', `/sessions/${id}`)
    } catch (e) {
      setError(e)
    }
    void queries.invalidateQueries({ queryKey: ['sessions'] })
  }
  if (list.error && !list.data) return <Problem error={list.error} onRetry={() => void list.refetch()} />
  if (!list.data) return <Skeleton rows={3} height={30} />
  return (
    <section className="card">
      <div className="card-head">
        <h2>Sessions</h2>
        <span className="muted">{count(list.data.length, 'session')}, each ends 12 h after its last use</span>
      </div>
      {error !== undefined && <Problem error={error} />}
      <div
        className="table-wrap cards-narrow"
        style={{ border: 0, flex: 'none' }}
        tabIndex={0}
        role="region"
        aria-label="Sessions">
        <table className="table">
          <thead>
            <tr>
              <th>Key</th>
              <th>Browser</th>
              <th>Address</th>
              <th>Signed in</th>
              <th>Last used</th>
              <th>
                <span className="sr-only">Actions</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {list.data.map((s) => (
              <tr key={s.id}>
                <td>{s.keyID ? <code>{s.keyID}</code> : 'owner of the host'}</td>
                <td className="card-line" title={visible(s.browser)}>
                  {visible(browserName(s.browser))}
                  {s.isCurrent && <span className="sub">this browser</span>}
                </td>
                <td className="card-line">
                  <code>{s.address}</code>
                </td>
                <td className="card-line">
                  <Time at={s.createdMs} />
                </td>
                <td className="card-line">{duration((Date.now() - s.usedMs) / 1000)} ago</td>
                <td className="right">
                  <Button small look="danger" onClick={() => void end(s.id)}>
                    {s.isCurrent ? 'Sign out' : 'End'}
                  </Button>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  )
}

/** Revokes a key. Suggests the keys that are not revoked. */
function Revoke() {
  const keys = useQuery({
    queryKey: ['keys'],
    queryFn: async ({ signal }) => data(await api.GET('/keys', { signal }))!,
  })
  const [key, setKey] = useState('')
  const [withEnd, setWithEnd] = useState(false)
  const [isOpen, setOpen] = useState(false)
  const known = keys.data?.filter((k) => k.revokedAt == null) ?? []
  const command = {
    jiffy: ['key', 'revoke', ...(withEnd ? ['--end'] : []), '--', key],
    method: 'POST',
    path: `/keys/${encodeURIComponent(key)}/revoke`,
    body: { end: withEnd },
  }
  return (
    <section className="card">
      <div className="card-head">
        <h2>Revoke a key</h2>
      </div>
      <form
        className="card-body stack"
        onSubmit={(e) => {
          e.preventDefault()
          setOpen(true)
        }}>
        <Field id="revoked" label="Id or name of the key">
          <input
            id="revoked"
            className="input mono"
            style={{ maxWidth: 340 }}
            list="known-keys"
            value={key}
            onChange={(e) => setKey(e.target.value)}
            autoComplete="off"
            spellCheck={false}
          />
          <datalist id="known-keys">
            {known.map((k) => (
              <option key={k.keyID} value={k.keyID}>
                {visible(k.name)}
              </option>
            ))}
          </datalist>
        </Field>
        <label className="row">
          <input type="checkbox" checked={withEnd} onChange={(e) => setWithEnd(e.target.checked)} /> Also kill its
          sandboxes and cancel its builds
        </label>
        {key && <AsCommand command={command} />}
        <div>
          <Button type="submit" look="danger" disabled={!key}>
            Revoke
          </Button>
        </div>
      </form>
      {isOpen && (
        <ConfirmDialog
          title={`Revoke ${visible(key)}?`}
          label="Revoke"
          danger
          command={command}
          onClose={() => setOpen(false)}
          onDone={() => {
            setKey('')
            void keys.refetch()
          }}
          run={() => api.POST('/keys/{keyID}/revoke', { params: { path: { keyID: key } }, body: { end: withEnd } })}>
          The key and its sessions end at once.{' '}
          {withEnd ? 'All its running and paused sandboxes are killed.' : 'Its sandboxes continue until their timeout.'}
        </ConfirmDialog>
      )}
    </section>
  )
}
