import { useMemo, useState } from 'react'

/** Selected rows by id. A range extends from the row that was selected last. */
export function useSelection(ids: string[]) {
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set())
  const [anchor, setAnchor] = useState<string>()

  const toggle = (id: string, range = false) => {
    const next = new Set(selected)
    const from = anchor === undefined ? -1 : ids.indexOf(anchor)
    const to = ids.indexOf(id)
    if (range && from >= 0 && to >= 0) {
      for (const one of ids.slice(Math.min(from, to), Math.max(from, to) + 1)) next.add(one)
    } else if (!next.delete(id)) {
      next.add(id)
    }
    setAnchor(id)
    setSelected(next)
  }
  // Rows that no longer match are not acted upon.
  const shown = useMemo(() => (selected.size === 0 ? [] : ids.filter((id) => selected.has(id))), [ids, selected])
  return {
    ids: shown,
    has: (id: string) => selected.has(id),
    toggle,
    all: () => setSelected(new Set(ids)),
    clear: () => setSelected(new Set()),
  }
}
