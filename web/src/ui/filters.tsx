import type { ReactNode } from 'react'
import { visible } from '../lib/visible'

type SearchProps = { label: string; placeholder: string; value?: string; onChange: (value?: string) => void }

/** Search field of a list. An empty field is `undefined`, so that it is omitted from the URL. */
export function SearchField({ label, placeholder, value, onChange }: SearchProps) {
  return (
    <input
      className="input search"
      type="search"
      aria-label={label}
      placeholder={placeholder}
      value={value ?? ''}
      onChange={(e) => onChange(e.target.value || undefined)}
    />
  )
}

type FilterProps = {
  label: string
  value?: string
  options: readonly string[]
  /** Text of an option. Defaults to the option. */
  text?: (option: string) => ReactNode
  onChange: (value?: string) => void
}

/** Filter of a list by one of the options. No selection is `undefined`. */
export function FilterSelect({ label, value, options, text = visible, onChange }: FilterProps) {
  return (
    <select
      className="select"
      aria-label={label}
      value={value ?? ''}
      onChange={(e) => onChange(e.target.value || undefined)}>
      <option value="">{label}: all</option>
      {options.map((option) => (
        <option key={option} value={option}>
          {text(option)}
        </option>
      ))}
    </select>
  )
}
