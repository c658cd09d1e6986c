import { useNavigate, useSearch } from '@tanstack/react-router'

/** Search parameters of the page. A change replaces the address, so that *Back* leaves the page. */
export function useFilters<T extends object>(): [T, (change: Partial<T>) => void] {
  const filters: unknown = useSearch({ strict: false })
  const navigate = useNavigate()
  const update = (change: Partial<T>) =>
    void navigate({ to: '.', search: (old: object) => ({ ...old, ...change }), replace: true } as never)
  return [filters as T, update]
}

/** Sorts rows by a column. `sort` is the name of the column, with a leading `-` in descending order. */
export function sorted<T>(rows: T[], sort: string, columns: Record<string, (row: T) => string | number>): T[] {
  const isDescending = sort.startsWith('-')
  const value = columns[sort.replace(/^-/, '')]
  if (!value) return rows
  const factor = isDescending ? -1 : 1
  return rows.toSorted((a, b) => {
    const [x, y] = [value(a), value(b)]
    const order = typeof x === 'string' ? x.localeCompare(String(y)) : x - Number(y)
    return order * factor
  })
}
