import { useMemo } from 'react'
import { useNavigate, useSearch } from '@tanstack/react-router'
import { type LineageOf, useSandboxes, useSnapshots } from '../api/queries'
import { visible } from '../lib/visible'
import { Empty, Field, Problem, Skeleton } from '../ui/controls'
import { LineageView } from '../ui/lineage-view'

/** Sandbox whose lineage can be shown. */
interface Choice {
  id: string
  name: string
}

/** The tree of a sandbox that the user chooses. By default the sandbox of the newest snapshot. */
export function LineagePage() {
  const { at, of } = useSearch({ strict: false }) as { at?: string; of?: string }
  const navigate = useNavigate()
  const sandboxes = useSandboxes()
  const snapshots = useSnapshots(false)
  const choices = useMemo(() => {
    const found = new Map<string, Choice>()
    const taken = [...(snapshots.data ?? [])].sort((a, b) => b.jiffy.created_ms - a.jiffy.created_ms)
    for (const s of taken) {
      const id = s.originSandboxID
      // Names are in the list of sandboxes.
      if (id) found.set(id, { id, name: `${id.slice(0, 12)}${sandboxes.data ? ' (deleted)' : ''}` })
    }
    for (const s of sandboxes.data ?? []) {
      found.set(s.sandboxID, { id: s.sandboxID, name: s.name ?? s.sandboxID.slice(0, 12) })
    }
    return [...found.values()]
  }, [sandboxes.data, snapshots.data])
  const error = sandboxes.error ?? snapshots.error
  const isLoaded = sandboxes.data && snapshots.data
  // Without a choice: the sandbox of the newest snapshot. Only a host without snapshots needs the
  // list of sandboxes, which may be long.
  const first = at || !snapshots.data ? undefined : choices[0]?.id
  // A link to a snapshot has its id only.
  const sandbox = of ?? first ?? choices.find((c) => c.id === at)?.id
  const shown: LineageOf | undefined = sandbox ? { sandboxID: sandbox } : at ? { snapshotID: at } : undefined
  const linked = snapshots.data?.find((s) => s.snapshotID === at)
  const value = sandbox ?? linked?.originSandboxID ?? ''
  return (
    <div className="page fill">
      <header className="page-head">
        <h1>Lineage</h1>
        {choices.length > 0 && (
          <Field id="lineage-of" label="Sandbox">
            <select
              id="lineage-of"
              className="select"
              value={value}
              onChange={(e) => void navigate({ to: '/lineage', search: { of: e.target.value } })}>
              {!choices.some((choice) => choice.id === value) && (
                <option value={value}>{value ? visible(value.slice(0, 12)) : '–'}</option>
              )}
              {choices.map((choice) => (
                <option key={choice.id} value={choice.id}>
                  {visible(choice.name)}
                </option>
              ))}
            </select>
          </Field>
        )}
      </header>
      {shown ? (
        <LineageView
          of={shown}
          at={at}
          onSelect={(next, lane) => {
            const search = { of: sandbox ?? (lane || undefined), at: next }
            void navigate({ to: '/lineage', search, replace: true })
          }}
        />
      ) : error && !isLoaded ? (
        <Problem
          error={error}
          onRetry={() => {
            void sandboxes.refetch()
            void snapshots.refetch()
          }}
        />
      ) : !isLoaded ? (
        <Skeleton rows={8} />
      ) : (
        <Empty title="No sandboxes yet" command="jiffy create --name agent">
          <p>Snapshots and forks of a sandbox form a tree, which is shown here.</p>
        </Empty>
      )}
    </div>
  )
}
