import { type ReactNode, useState } from 'react'
import { api, data, type Schemas } from '../api/client'
import { keyCommands } from '../lib/key-commands'
import { count } from '../lib/format'
import { visible } from '../lib/visible'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Button, CodeBlock, Dialog, Field } from '../ui/controls'
import { notify } from '../ui/toast'

type ApiKey = Schemas['ApiKey']
type Created = Schemas['NewApiKey']

const DAY_MS = 86_400_000

const expiries: [string, string][] = [
  ['', 'never'],
  ['1', 'in 1 day'],
  ['7', 'in 7 days'],
  ['30', 'in 30 days'],
  ['90', 'in 90 days'],
  ['365', 'in 1 year'],
]

/** Shows a secret once. Only the button closes the dialog. */
function SecretDialog({ created, onClose, children }: { created: Created; onClose: () => void; children?: ReactNode }) {
  return (
    <Dialog title={`Secret of ${visible(created.key.name)}`} onClose={onClose} isLocked>
      <p>
        <strong>Copy the secret now.</strong> The host stores only its hash, so it is not shown again.
      </p>
      <CodeBlock text={created.secret} />
      {children}
      <div className="buttons">
        <Button look="primary" onClick={onClose}>
          Done
        </Button>
      </div>
    </Dialog>
  )
}

function Expiry({
  id,
  value,
  none,
  onChange,
}: {
  id: string
  value: string
  none: string
  onChange: (v: string) => void
}) {
  return (
    <Field id={id} label="Expires">
      <select id={id} className="select" value={value} onChange={(e) => onChange(e.target.value)}>
        {expiries.map(([days, label]) => (
          <option key={days} value={days}>
            {days ? label : none}
          </option>
        ))}
      </select>
    </Field>
  )
}

/** The time in whole seconds, because the command line accepts no fractions. */
const afterDays = (days: string) =>
  days ? `${new Date(Date.now() + Number(days) * DAY_MS).toISOString().slice(0, 19)}Z` : undefined

const limits: [keyof Schemas['KeyLimits'], string][] = [
  ['sandboxes', 'Running sandboxes'],
  ['createsPerMinute', 'New sandboxes per minute'],
  ['vcpus', 'Processors'],
  ['memoryMB', 'Memory in MiB'],
  ['paused', 'Paused sandboxes'],
  ['snapshots', 'Snapshots'],
  ['templates', 'Templates'],
  ['builds', 'Builds'],
  ['diskMB', 'Disk in MiB'],
  ['exchanges', 'Requests and streams'],
]

export function CreateKeyDialog({ onClose }: { onClose: () => void }) {
  const [form, setForm] = useState({ name: '', scope: 'create', addresses: '' })
  const [days, setDays] = useState('')
  const [expiresAt, setExpiresAt] = useState<string>()
  const [maxima, setMaxima] = useState<Record<string, string>>({})
  const [created, setCreated] = useState<Created>()
  const set = (key: keyof typeof form) => (event: { target: { value: string } }) =>
    setForm({ ...form, [key]: event.target.value })
  const numbers = Object.entries(maxima).filter(([, value]) => value !== '')
  const addresses = form.addresses.split(/[\s,]+/).filter(Boolean)
  const body = {
    ...(form.name ? { name: form.name } : {}),
    scope: form.scope as Schemas['KeyScope'],
    ...(numbers.length > 0 ? { limits: Object.fromEntries(numbers.map(([k, v]) => [k, Number(v)])) } : {}),
    ...(expiresAt ? { expiresAt } : {}),
    ...(addresses.length > 0 ? { addresses } : {}),
  }
  if (created) return <SecretDialog created={created} onClose={onClose} />
  return (
    <ConfirmDialog
      title="Create a key"
      label="Create"
      wide
      command={keyCommands.create(body)}
      onClose={onClose}
      isOpenAfterwards
      run={async () => setCreated(data(await api.POST('/keys', { body: body as Schemas['CreateKey'] }))!)}>
      <div className="form-grid">
        <Field id="key-name" label="Name" hint="1 to 100 printable characters">
          <input
            id="key-name"
            className="input"
            autoFocus
            autoComplete="off"
            spellCheck={false}
            maxLength={100}
            value={form.name}
            onChange={set('name')}
          />
        </Field>
        <Field
          id="key-scope"
          label="Scope"
          hint={
            form.scope === 'admin'
              ? 'All objects of this host, also those of other keys'
              : form.scope === 'read'
                ? 'All objects of this host, without secrets and changes'
                : 'Own sandboxes, snapshots, templates and functions'
          }>
          <select id="key-scope" className="select" value={form.scope} onChange={set('scope')}>
            <option value="create">create</option>
            <option value="read">read</option>
            <option value="admin">admin</option>
          </select>
        </Field>
        <Expiry
          id="key-expires"
          none="never"
          value={days}
          onChange={(value) => {
            setDays(value)
            setExpiresAt(afterDays(value))
          }}
        />
        <Field id="key-addresses" label="Addresses" hint="Addresses or networks that may use the key. Empty for all">
          <input
            id="key-addresses"
            className="input mono"
            autoComplete="off"
            spellCheck={false}
            placeholder="10.0.0.0/8"
            value={form.addresses}
            onChange={set('addresses')}
          />
        </Field>
      </div>
      <fieldset className="fields">
        <legend>Limits</legend>
        <div className="limits">
          {limits.map(([limit, label]) => (
            <Field key={limit} id={`limit-${limit}`} label={label}>
              <input
                id={`limit-${limit}`}
                className="input"
                type="number"
                min={0}
                placeholder="no limit"
                value={maxima[limit] ?? ''}
                onChange={(e) => setMaxima({ ...maxima, [limit]: e.target.value })}
              />
            </Field>
          ))}
        </div>
      </fieldset>
    </ConfirmDialog>
  )
}

export function RotateKeyDialog({ apiKey, onClose }: { apiKey: ApiKey; onClose: () => void }) {
  const [overlap, setOverlap] = useState('0')
  const [days, setDays] = useState('')
  const [expiresAt, setExpiresAt] = useState<string>()
  const [created, setCreated] = useState<Created>()
  const body = { overlapMs: Number(overlap) * 1000, ...(expiresAt ? { expiresAt } : {}) }
  if (created)
    return (
      <SecretDialog created={created} onClose={onClose}>
        {body.overlapMs > 0 && <p className="muted">The previous secret remains valid for the selected time.</p>}
      </SecretDialog>
    )
  const params = { path: { keyID: apiKey.keyID } }
  return (
    <ConfirmDialog
      title={`Rotate ${visible(apiKey.name)}?`}
      label="Rotate"
      command={keyCommands.rotate(apiKey.keyID, body)}
      onClose={onClose}
      isOpenAfterwards
      run={async () => setCreated(data(await api.POST('/keys/{keyID}/rotate', { params, body }))!)}>
      <p>The key receives a new secret. Sessions that were signed in with the previous secret end.</p>
      <div className="form-grid">
        <Field id="overlap" label="The previous secret remains valid">
          <select id="overlap" className="select" value={overlap} onChange={(e) => setOverlap(e.target.value)}>
            <option value="0">not at all</option>
            <option value="3600">for 1 h</option>
            <option value="86400">for 1 day</option>
            <option value="604800">for 7 days</option>
          </select>
        </Field>
        <Expiry
          id="rotate-expires"
          none="as before"
          value={days}
          onChange={(value) => {
            setDays(value)
            setExpiresAt(afterDays(value))
          }}
        />
      </div>
    </ConfirmDialog>
  )
}

export function RevokeKeyDialog({ apiKey, onClose }: { apiKey: ApiKey; onClose: () => void }) {
  const [end, setEnd] = useState(false)
  const params = { path: { keyID: apiKey.keyID } }
  return (
    <ConfirmDialog
      title={`Revoke ${visible(apiKey.name)}?`}
      label="Revoke"
      danger
      command={keyCommands.revoke(apiKey.keyID, end)}
      onClose={onClose}
      run={async () => {
        const revoked = data(await api.POST('/keys/{keyID}/revoke', { params, body: { end } }))!
        const hosts = revoked.unconfirmedHosts ?? []
        if (hosts.length > 0) notify(`The revocation was not confirmed by ${hosts.join(', ')}`, true)
        if (end) {
          const sandboxes = count(revoked.sandboxes ?? 0, 'sandbox', 'sandboxes')
          notify(`Killed ${sandboxes}, cancelled ${count(revoked.builds ?? 0, 'build')}`)
        }
      }}>
      <p>
        The key and its sessions end at once.{' '}
        {end ? 'All its running and paused sandboxes are killed.' : 'Its sandboxes continue until their timeout.'}
      </p>
      <label className="row">
        <input type="checkbox" checked={end} onChange={(e) => setEnd(e.target.checked)} /> Also kill its sandboxes and
        cancel its builds
      </label>
    </ConfirmDialog>
  )
}
