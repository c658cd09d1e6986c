/** A time as the user enters it. */
export interface EnteredTime {
  amount: string
  /** Number of seconds of the unit, or one of the choices without an amount. */
  unit: string
}

const UNITS: [unit: string, label: string][] = [
  ['1', 's'],
  ['60', 'min'],
  ['3600', 'h'],
  ['86400', 'd'],
]

const hasAmount = ({ unit }: EnteredTime) => UNITS.some(([value]) => value === unit)

/** Returns the entered time in seconds. `undefined` for a choice without an amount. */
export function enteredSeconds(time: EnteredTime): number | undefined {
  return hasAmount(time) ? Math.round(Number(time.amount) * Number(time.unit)) : undefined
}

/** Returns whether the time is a choice without an amount, or at least one second. */
export function isValidTime(time: EnteredTime): boolean {
  return (enteredSeconds(time) ?? 1) > 0
}

/** Input of a time: a number and its unit, or one of `choices` without a number. */
export function TimeInput({
  id,
  unitLabel,
  choices,
  value,
  onChange,
}: {
  id: string
  unitLabel: string
  choices: [unit: string, label: string][]
  value: EnteredTime
  onChange: (time: EnteredTime) => void
}) {
  return (
    <div className="row">
      <input
        id={id}
        className="input"
        type="number"
        min={1}
        step="any"
        disabled={!hasAmount(value)}
        value={value.amount}
        onChange={(e) => onChange({ ...value, amount: e.target.value })}
      />
      <select
        className="select"
        aria-label={unitLabel}
        value={value.unit}
        onChange={(e) => onChange({ ...value, unit: e.target.value })}>
        {[...UNITS, ...choices].map(([unit, label]) => (
          <option key={unit} value={unit}>
            {label}
          </option>
        ))}
      </select>
    </div>
  )
}
