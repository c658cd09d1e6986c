import { useState } from 'react'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { callJson } from '../api/client'
import { count, duration } from '../lib/format'
import { visible } from '../lib/visible'
import { Button, Problem, Skeleton, Time } from '../ui/controls'

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

/** Sessions of the own key, and of all keys for administrators. */
export function Sessions() {
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
      <div className="table-wrap cards-narrow in-card" tabIndex={0} role="region" aria-label="Sessions">
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
                <td className="card-line" data-label="Browser" title={visible(s.browser)}>
                  {visible(browserName(s.browser))}
                  {s.isCurrent && <span className="sub">this browser</span>}
                </td>
                <td className="card-line" data-label="Address">
                  <code>{s.address}</code>
                </td>
                <td className="card-line" data-label="Signed in">
                  <Time at={s.createdMs} />
                </td>
                <td className="card-line" data-label="Last used">
                  {duration((Date.now() - s.usedMs) / 1000)} ago
                </td>
                <td className="actions-cell">
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
