import { type ReactNode, useState } from 'react'
import { useRefresh } from '../api/queries'
import type { Command } from '../lib/commands'
import { AsCommand } from './as-command'
import { Button, Dialog, Problem } from './controls'

/** Dialog that confirms an action and shows its commands. Errors are shown in the dialog. */
export function ConfirmDialog({
  title,
  label,
  danger,
  wide,
  disabled,
  isOpenAfterwards,
  command,
  run,
  onDone,
  onClose,
  children,
}: {
  title: string
  label: string
  danger?: boolean
  wide?: boolean
  disabled?: boolean
  /** True if the caller replaces the dialog with the result. */
  isOpenAfterwards?: boolean
  command?: Command | Command[]
  run: () => Promise<unknown>
  onDone?: () => void
  onClose: () => void
  children: ReactNode
}) {
  const [busy, setBusy] = useState(false)
  const [error, setError] = useState<unknown>()
  const refresh = useRefresh()
  const submit = async () => {
    setBusy(true)
    setError(undefined)
    try {
      await run()
      refresh()
      if (!isOpenAfterwards) onClose()
      onDone?.()
    } catch (e) {
      setError(e)
      setBusy(false)
    }
  }
  return (
    <Dialog title={title} wide={wide} onClose={onClose}>
      <form
        className="stack"
        onSubmit={(event) => {
          event.preventDefault()
          if (!busy && !disabled) void submit()
        }}>
        <div className="stack">{children}</div>
        {error !== undefined && <Problem error={error} />}
        {command && <AsCommand command={command} />}
        <div className="buttons">
          <Button onClick={onClose}>Cancel</Button>
          <Button type="submit" look={danger ? 'primary danger' : 'primary'} busy={busy} disabled={disabled}>
            {label}
          </Button>
        </div>
      </form>
    </Dialog>
  )
}
