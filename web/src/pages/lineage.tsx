import { useNavigate, useSearch } from '@tanstack/react-router'
import { LineageView } from '../ui/lineage-view'

export function LineagePage() {
  const { at } = useSearch({ strict: false }) as { at?: string }
  const navigate = useNavigate()
  return (
    <div className="page fill">
      <header className="page-head">
        <h1>Lineage</h1>
      </header>
      <LineageView
        at={at}
        onSelect={(next) => void navigate({ to: '/lineage', search: { at: next }, replace: true })}
      />
    </div>
  )
}
