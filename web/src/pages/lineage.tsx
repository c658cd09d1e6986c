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
      if (id) found.set(id, { id, name: `${id.slice(0, 12)} (deleted)` })
    }
    for (const s of sandboxes.data ?? []) {
      found.set(s.sandboxID, { id: s.sandboxID, name: s.name ?? s.sandboxID.slice(0, 12) })
    }
    return [...found.values()]
  }, [sandboxes.data, snapshots.data])
  const error = sandboxes.error ?? snapshots.error
  const isLoaded = sandboxes.data && snapshots.data
  // A link to a snapshot has its id only.
  const linked = at && snapshots.data?.find((s) => s.snapshotID === at)
  const sandbox = of ?? (linked ? undefined : (choices.find((c) => c.id === at) ?? choices[0])?.id)
  const shown: LineageOf | undefined = sandbox ? { sandboxID: sandbox } : linked ? { snapshotID: at! } : undefined
  return (
    <div className="page fill">
      <header className="page-head">
        <h1>Lineage</h1>
        {choices.length > 0 && (
          <Field id="lineage-of" label="Sandbox">
            <select
              id="lineage-of"
              className="select"
              value={sandbox ?? (linked ? linked.originSandboxID : '')}
              onChange={(e) => void navigate({ to: '/lineage', search: { of: e.target.value } })}>
              {choices.map((choice) => (
                <option key={choice.id} value={choice.id}>
                  {visible(choice.name)}
                </option>
              ))}
            </select>
          </Field>
        )}
      </header>
      {error && !isLoaded ? (
        <Problem error={error} onRetry={() => void sandboxes.refetch()} />
      ) : !isLoaded ? (
        <Skeleton rows={8} />
      ) : shown ? (
        <LineageView
          of={shown}
          at={at}
          onSelect={(next) => void navigate({ to: '/lineage', search: { of, at: next }, replace: true })}
        />
      ) : (
        <Empty title="No sandboxes yet" command="jiffy create --name agent">
          <p>Snapshots and forks of a sandbox form a tree, which is shown here.</p>
        </Empty>
      )}
    </div>
  )
}
