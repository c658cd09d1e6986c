import { useEffect, useMemo, useRef, useState } from 'react'

/** Selected rows by id. A range extends from the row that was selected last. */
export function useSelection(ids: string[]) {
  const [selected, setSelected] = useState<ReadonlySet<string>>(new Set())
  // A row keeps the `toggle` of its last drawing. `toggle` therefore reads the state when it is
  // called.
  const shownIds = useRef(ids)
  const anchor = useRef<string>(undefined)
  useEffect(() => {
    shownIds.current = ids
  })

  const toggle = (id: string, range = false) => {
    const present = shownIds.current
    const from = anchor.current === undefined ? -1 : present.indexOf(anchor.current)
    const to = present.indexOf(id)
    anchor.current = id
    setSelected((before) => {
      const next = new Set(before)
      if (range && from >= 0 && to >= 0) {
        for (const one of present.slice(Math.min(from, to), Math.max(from, to) + 1)) next.add(one)
      } else if (!next.delete(id)) {
        next.add(id)
      }
      return next
    })
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
