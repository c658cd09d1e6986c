import { useState } from 'react'
import { api, type SandboxDetail } from '../api/client'
import { useNow } from '../api/queries'
import { commands, type Timeouts } from '../lib/commands'
import { countDown, duration, remaining } from '../lib/format'
import { visible } from '../lib/visible'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Field } from '../ui/controls'
import { type EnteredTime, enteredSeconds, isValidTime, TimeInput } from '../ui/time-input'
import { notify } from '../ui/toast'

const RETAIN: [unit: string, label: string] = ['retain', 'unchanged']

/** Sets the timeout and the idle timeout of a sandbox, counted from now. */
export function TimeoutDialog({ sandbox, onClose }: { sandbox: SandboxDetail; onClose: () => void }) {
  const [timeout, enterTimeout] = useState<EnteredTime>({ amount: '1', unit: 'retain' })
  const [idle, enterIdle] = useState<EnteredTime>({ amount: '10', unit: 'retain' })
  const left = remaining(sandbox.jiffy.deadline_ms, useNow())
  const id = sandbox.sandboxID
  const { on_timeout, idle_timeout_s } = sandbox.jiffy.terms
  const body: Timeouts = {}
  const seconds = timeout.unit === 'none' ? -1 : enteredSeconds(timeout)
  const idleSeconds = idle.unit === 'never' ? 0 : enteredSeconds(idle)
  if (seconds !== undefined) body.timeout = seconds
  if (idleSeconds !== undefined) body.idleTimeout = idleSeconds
  const isValid = isValidTime(timeout) && isValidTime(idle) && Object.keys(body).length > 0
  return (
    <ConfirmDialog
      title={`Timeouts of ${visible(sandbox.name ?? id)}`}
      label="Set the timeouts"
      disabled={!isValid}
      command={isValid ? commands.timeout(id, body) : undefined}
      onClose={onClose}
      run={() => api.POST('/sandboxes/{sandboxID}/timeout', { params: { path: { sandboxID: id } }, body })}
      onDone={() => notify('The timeouts are set')}>
      <Field
        id="new-timeout"
        label="Timeout"
        hint={`Counted from now. The sandbox is then ${on_timeout === 'pause' ? 'paused' : 'killed'}. Remaining: ${
          left === null ? 'no limit' : countDown(left)
        }`}>
        <TimeInput
          id="new-timeout"
          unitLabel="Unit of the timeout"
          choices={[['none', 'no limit'], RETAIN]}
          value={timeout}
          onChange={enterTimeout}
        />
      </Field>
      <Field
        id="new-idle-timeout"
        label="Idle timeout"
        hint={`Time without use after which the sandbox is paused. At present: ${
          idle_timeout_s ? duration(idle_timeout_s) : 'never'
        }`}>
        <TimeInput
          id="new-idle-timeout"
          unitLabel="Unit of the idle timeout"
          choices={[['never', 'never'], RETAIN]}
          value={idle}
          onChange={enterIdle}
        />
      </Field>
    </ConfirmDialog>
  )
}
