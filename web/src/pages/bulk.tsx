import { useRef, useState } from 'react'
import { messageOf, type Sandbox } from '../api/client'
import { useRefresh } from '../api/queries'
import { MAX_FORK, type SandboxAction } from '../lib/actions'
import { count } from '../lib/format'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { Button, Dialog, Field } from '../ui/controls'

type Progress = 'waiting' | 'running' | 'done' | { error: string }

/** Maximum number of sandboxes on which a bulk action runs concurrently. */
const AT_ONCE = 4
/** Maximum number of sandboxes shown before the start, and of completed ones afterwards. */
const SHOWN = 10
/** Maximum number of sandboxes for which the commands are shown. */
const MAX_COMMANDS = 100

export function BulkDialog({
  action,
  sandboxes,
  onClose,
}: {
  action: SandboxAction
  sandboxes: Sandbox[]
  onClose: (done: boolean) => void
}) {
  // The set is fixed when the dialog opens, although the table changes.
  const [all] = useState(sandboxes)
  const targets = all.filter((s) => action.states.includes(s.state))
  const skipped = all.length - targets.length
  const [progress, setProgress] = useState<Record<string, Progress>>({})
  const [phase, setPhase] = useState<'confirm' | 'running' | 'done'>('confirm')
  const stop = useRef(false)
  const [number, setNumber] = useState('1')
  const copies = Math.min(MAX_FORK, Math.max(1, Math.trunc(Number(number)) || 1))
  const refresh = useRefresh()

  const start = async () => {
    setPhase('running')
    const queue = [...targets]
    const set = (id: string, to: Progress) => setProgress((now) => ({ ...now, [id]: to }))
    const worker = async () => {
      for (let next = queue.shift(); next && !stop.current; next = queue.shift()) {
        set(next.sandboxID, 'running')
        try {
          await action.run(next.sandboxID, copies)
          set(next.sandboxID, 'done')
        } catch (error) {
          set(next.sandboxID, { error: messageOf(error) })
        }
      }
    }
    await Promise.all(Array.from({ length: AT_ONCE }, worker))
    setPhase('done')
    refresh()
  }
  const results = Object.values(progress)
  const done = results.filter((p) => p === 'done').length
  const failures = targets.filter((s) => typeof progress[s.sandboxID] === 'object')
  const shown =
    phase === 'confirm'
      ? targets.slice(0, SHOWN)
      : [
          ...failures,
          ...targets.filter((s) => progress[s.sandboxID] === 'running'),
          ...targets.filter((s) => progress[s.sandboxID] === 'done').slice(-SHOWN),
        ]
  const title = `${action.label}: ${count(targets.length, 'sandbox', 'sandboxes')}`
  return (
    <Dialog
      title={title}
      onClose={() => {
        stop.current = true
        onClose(phase !== 'confirm')
      }}>
      {skipped > 0 && (
        <p className="muted">{count(skipped, 'sandbox is', 'sandboxes are')} not in a suitable state and skipped.</p>
      )}
      {phase === 'confirm' && action.effect && <p>{action.effect}</p>}
      {phase === 'confirm' && action.hasCount && (
        <Field
          id="bulk-copies"
          label="Copies of each sandbox"
          hint={`Together ${count(targets.length * copies, 'new sandbox', 'new sandboxes')}`}>
          <input
            id="bulk-copies"
            className="input"
            type="number"
            min={1}
            max={MAX_FORK}
            value={number}
            onChange={(e) => setNumber(e.target.value)}
          />
        </Field>
      )}
      {phase !== 'confirm' && (
        <p role="status">
          {done} of {targets.length} done{failures.length > 0 && `, ${failures.length} failed`}
          {phase === 'done' &&
            done + failures.length < targets.length &&
            `, stopped before ${targets.length - done - failures.length}`}
        </p>
      )}
      <ul className="bulk-list" tabIndex={0} aria-label="Sandboxes">
        {shown.map((s) => {
          const p = progress[s.sandboxID]
          return (
            <li key={s.sandboxID} className="row">
              <span className="truncate">{visible(s.name ?? s.sandboxID)}</span>
              {s.name && <code className="muted">{s.sandboxID.slice(0, 8)}</code>}
              <span className="grow right">
                {p === 'running' && <span className="spinner" aria-label="in progress" />}
                {p === 'done' && 'done'}
              </span>
              {typeof p === 'object' && <span className="field problem">{visible(p.error)}</span>}
            </li>
          )
        })}
        {phase === 'confirm' && targets.length > SHOWN && <li className="muted">and {targets.length - SHOWN} more</li>}
      </ul>
      {phase === 'confirm' && targets.length > 0 && targets.length <= MAX_COMMANDS && (
        <AsCommand command={targets.map((s) => action.command(s.sandboxID, copies))} />
      )}
      <div className="buttons">
        {phase === 'confirm' && (
          <>
            <Button onClick={() => onClose(false)}>Cancel</Button>
            <Button
              look={action.danger ? 'primary danger' : 'primary'}
              disabled={targets.length === 0}
              onClick={() => void start()}>
              {action.label}
            </Button>
          </>
        )}
        {phase === 'running' && (
          <Button
            onClick={() => {
              stop.current = true
            }}>
            Stop
          </Button>
        )}
        {phase === 'done' && (
          <Button look="primary" onClick={() => onClose(true)}>
            Close
          </Button>
        )}
      </div>
    </Dialog>
  )
}
