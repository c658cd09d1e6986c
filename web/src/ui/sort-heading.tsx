/** Heading of a column that sorts the table. `sort` is the name of the column, with `-` if descending. */
export function SortHeading({
  id,
  label,
  sort,
  isNumber,
  isWide,
  onSort,
}: {
  id: string
  label: string
  sort: string
  isNumber?: boolean
  isWide?: boolean
  onSort: (sort: string) => void
}) {
  const isActive = sort.replace(/^-/, '') === id
  const isDescending = isActive && sort.startsWith('-')
  return (
    <th
      className={`${isNumber ? 'num' : ''}${isWide ? ' wide-only' : ''}`}
      aria-sort={isActive ? (isDescending ? 'descending' : 'ascending') : undefined}>
      <button type="button" onClick={() => onSort(isActive && !isDescending ? `-${id}` : id)}>
        {label}
        {isActive && <span aria-hidden="true">{isDescending ? '↓' : '↑'}</span>}
      </button>
    </th>
  )
}
