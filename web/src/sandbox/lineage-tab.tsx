import { useNavigate, useParams, useSearch } from '@tanstack/react-router'
import { useSandbox } from '../api/queries'
import { Skeleton } from '../ui/controls'
import { LineageView } from '../ui/lineage-view'

export function LineageTab() {
  const { id } = useParams({ strict: false }) as { id: string }
  const { at } = useSearch({ strict: false }) as { at?: string }
  const navigate = useNavigate()
  // The address may have the name of the sandbox.
  const sandbox = useSandbox(id).data
  if (!sandbox) return <Skeleton rows={8} />
  return (
    <LineageView
      of={{ sandboxID: sandbox.sandboxID }}
      sandbox={sandbox.sandboxID}
      at={at}
      onSelect={(next) => void navigate({ to: '.', search: { at: next } as never, replace: true })}
    />
  )
}
