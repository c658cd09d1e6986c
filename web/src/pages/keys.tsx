import { useState } from 'react'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { api, data, type Schemas } from '../api/client'
import { useNow } from '../api/queries'
import { useSession } from '../session'
import { sorted, useFilters } from '../lib/filters'
import { bytes, count, mib } from '../lib/format'
import { visible } from '../lib/visible'
import { Button, Dialog, Empty, Menu, Meter, Problem, Skeleton, Time } from '../ui/controls'
import { SortHeading } from '../ui/sort-heading'
import { FilterSelect, SearchField } from '../ui/filters'
import { CreateKeyDialog, RevokeKeyDialog, RotateKeyDialog } from './key-dialogs'
import { Budget } from './overview'
import { Sessions } from './sessions'
import { UsageCard } from './usage'

type ApiKey = Schemas['ApiKey']

interface Filters {
  q?: string
  state?: string
  scope?: string
  sort?: string
  use?: string
}

export function KeysPage() {
  const session = useSession()
  return (
    <div className="page">
      {session.isAdmin ? (
        <Keys />
      ) : (
        <>
          <header className="page-head">
            <h1>Keys and sessions</h1>
          </header>
          {session.keyID && (
            <>
              <h2>Use of this key</h2>
              <Budget />
            </>
          )}
          <p className="muted">
            Other keys are shown to keys of scope <code>admin</code>.
          </p>
        </>
      )}
      <UsageCard />
      <Sessions />
    </div>
  )
}

type KeyState = 'active' | 'expired' | 'revoked'

function stateOf(key: ApiKey, now: number): KeyState {
  if (key.revokedAt != null) return 'revoked'
  return key.expiresAt != null && Date.parse(key.expiresAt) <= now ? 'expired' : 'active'
}

const ms = (time: string | undefined) => (time == null ? 0 : Date.parse(time))

const columns: Record<string, (key: ApiKey) => string | number> = {
  name: (k) => k.name.toLowerCase(),
  scope: (k) => k.scope,
  created: (k) => -ms(k.createdAt),
  used: (k) => -ms(k.usedAt),
  expires: (k) => (k.expiresAt == null ? Number.MAX_SAFE_INTEGER : ms(k.expiresAt)),
}

function Keys() {
  const [filters, update] = useFilters<Filters>()
  const queries = useQueryClient()
  const now = useNow()
  const list = useQuery({
    queryKey: ['keys'],
    queryFn: async ({ signal }) => data(await api.GET('/keys', { signal }))!,
    refetchInterval: 5000,
  })
  const [dialog, setDialog] = useState<'create' | { kind: 'rotate' | 'revoke'; key: ApiKey }>()
  const close = () => {
    setDialog(undefined)
    void queries.invalidateQueries({ queryKey: ['keys'] })
    void queries.invalidateQueries({ queryKey: ['sessions'] })
  }
  const all = list.data ?? []
  const state = filters.state ?? 'active'
  const wanted = (filters.q ?? '').toLowerCase()
  const sort = filters.sort ?? 'created'
  const shown = sorted(
    all.filter((k) => {
      if (state !== 'all' && stateOf(k, now) !== state) return false
      if (filters.scope && k.scope !== filters.scope) return false
      return k.keyID.startsWith(wanted) || k.name.toLowerCase().includes(wanted)
    }),
    sort,
    columns,
  )
  const used = filters.use ? all.find((k) => k.keyID === filters.use) : undefined
  const heading = { sort, onSort: (next: string) => update({ sort: next }) }
  return (
    <>
      <header className="page-head">
        <h1>Keys and sessions</h1>
        {list.data && <span className="muted">{count(all.length, 'key')}</span>}
        <div className="actions">
          <Button look="primary" icon="plus" onClick={() => setDialog('create')}>
            Create a key
          </Button>
        </div>
      </header>
      {list.error && !list.data && <Problem error={list.error} onRetry={() => void list.refetch()} />}
      {!list.data && !list.error && <Skeleton rows={4} height={30} />}
      {list.data && (
        <>
          <div className="filters" role="search">
            <SearchField
              label="Filter keys"
              placeholder="Name or id"
              value={filters.q}
              onChange={(q) => update({ q })}
            />
            <select
              className="select"
              aria-label="State"
              value={state}
              onChange={(e) => update({ state: e.target.value === 'active' ? undefined : e.target.value })}>
              <option value="active">State: active</option>
              <option value="expired">expired</option>
              <option value="revoked">revoked</option>
              <option value="all">all</option>
            </select>
            <FilterSelect
              label="Scope"
              value={filters.scope}
              options={['admin', 'create', 'read']}
              onChange={(scope) => update({ scope })}
            />
          </div>
          {shown.length === 0 ? (
            <Empty
              title={all.length === 0 ? 'No keys yet' : 'No key matches'}
              command="jiffy key create --name ci --scope create --max-sandboxes 20">
              <p>A program needs an API key to use this host.</p>
            </Empty>
          ) : (
            <div className="table-wrap cards-narrow whole" tabIndex={0} role="region" aria-label="Keys">
              <table className="table">
                <thead>
                  <tr>
                    <SortHeading id="name" label="Name" {...heading} />
                    <th>State</th>
                    <SortHeading id="scope" label="Scope" {...heading} />
                    <SortHeading id="created" label="Created" isWide {...heading} />
                    <SortHeading id="used" label="Last used" {...heading} />
                    <SortHeading id="expires" label="Expires" isWide {...heading} />
                    <th className="wide-only">Addresses</th>
                    <th>
                      <span className="sr-only">Actions</span>
                    </th>
                  </tr>
                </thead>
                <tbody>
                  {shown.map((key) => (
                    <KeyRow
                      key={key.keyID}
                      apiKey={key}
                      state={stateOf(key, now)}
                      onUse={() => update({ use: key.keyID })}
                      onAction={(kind) => setDialog({ kind, key })}
                    />
                  ))}
                </tbody>
              </table>
            </div>
          )}
        </>
      )}
      {used && <UseDialog apiKey={used} onClose={() => update({ use: undefined })} />}
      {dialog === 'create' && <CreateKeyDialog onClose={close} />}
      {typeof dialog === 'object' && dialog.kind === 'rotate' && (
        <RotateKeyDialog apiKey={dialog.key} onClose={close} />
      )}
      {typeof dialog === 'object' && dialog.kind === 'revoke' && (
        <RevokeKeyDialog apiKey={dialog.key} onClose={close} />
      )}
    </>
  )
}

const looks = { active: 'good', expired: 'warn', revoked: 'bad' } as const

function KeyRow({
  apiKey: key,
  state,
  onUse,
  onAction,
}: {
  apiKey: ApiKey
  state: KeyState
  onUse: () => void
  onAction: (kind: 'rotate' | 'revoke') => void
}) {
  const name = visible(key.name)
  return (
    <tr>
      <td className="name">
        <button type="button" className="link" onClick={onUse}>
          {name}
        </button>
        <code className="sub">{key.keyID}</code>
      </td>
      <td>
        <span className={`badge ${looks[state]}`}>{state}</span>
      </td>
      <td className="card-line" data-label="Scope">
        {key.scope}
      </td>
      <td className="wide-only">
        <Time at={key.createdAt} />
      </td>
      <td className="card-line" data-label="Last used">
        {key.usedAt == null ? 'never' : <Time at={key.usedAt} />}
      </td>
      <td className="wide-only">{key.expiresAt == null ? 'never' : <Time at={key.expiresAt} />}</td>
      <td className="wide-only">{key.addresses?.length ? <code>{visible(key.addresses.join(', '))}</code> : 'all'}</td>
      <td className="actions-cell">
        <Menu
          label={`Actions on ${name}`}
          entries={[
            { label: 'Use and limits', icon: 'overview', onSelect: onUse },
            ...(state === 'revoked'
              ? []
              : [
                  { label: 'Rotate', icon: 'refresh' as const, onSelect: () => onAction('rotate') },
                  'line' as const,
                  { label: 'Revoke', icon: 'kill' as const, danger: true, onSelect: () => onAction('revoke') },
                ]),
          ]}
        />
      </td>
    </tr>
  )
}

/** Use of a key against its limits. */
function UseDialog({ apiKey, onClose }: { apiKey: ApiKey; onClose: () => void }) {
  const limits = useQuery({
    queryKey: ['limits', apiKey.keyID],
    queryFn: async ({ signal }) =>
      data(await api.GET('/limits', { params: { query: { key: apiKey.keyID } }, signal }))!,
    refetchInterval: 5000,
  })
  const b = limits.data
  const rows: [string, number | undefined, number | null, (n: number) => string][] = b
    ? [
        ['Running sandboxes', b.used.sandboxes, b.limits.sandboxes, String],
        ['Processors', b.used.vcpus, b.limits.vcpus, String],
        ['Memory', b.used.memoryMB, b.limits.memoryMB, mib],
        ['Paused sandboxes', b.used.paused, b.limits.paused, String],
        ['Snapshots', b.used.snapshots, b.limits.snapshots, String],
        ['Templates', b.used.templates, b.limits.templates, String],
        ['Builds', b.used.builds, b.limits.builds, String],
        ['Requests and streams', b.used.exchanges, b.limits.exchanges, String],
        ['New sandboxes per minute', undefined, b.limits.createsPerMinute, String],
        ['Disk', b.used.diskBytes, b.limits.diskBytes, bytes],
      ]
    : []
  return (
    <Dialog
      title={`Use of ${visible(apiKey.name)}`}
      onClose={onClose}
      description={
        <>
          Scope {apiKey.scope}, id <code>{apiKey.keyID}</code>
        </>
      }>
      {limits.error && !b && <Problem error={limits.error} onRetry={() => void limits.refetch()} />}
      {!b && !limits.error && <Skeleton rows={8} />}
      <ul className="uses" aria-label="Use and limits">
        {rows.map(([label, used, limit, format]) => (
          <li key={label}>
            <span>{label}</span>
            <span className="right muted">
              {used !== undefined && format(used)}
              {limit == null ? (used === undefined ? 'no limit' : ', no limit') : ` of ${format(limit)}`}
            </span>
            {used !== undefined && limit != null && (
              <Meter used={used} total={limit} label={`${label} of ${visible(apiKey.name)}`} />
            )}
          </li>
        ))}
      </ul>
    </Dialog>
  )
}
