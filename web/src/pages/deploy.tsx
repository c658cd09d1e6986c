import { useRef, useState } from 'react'
import { useQueryClient } from '@tanstack/react-query'
import { call, type Schemas } from '../api/client'
import { type DeploySettings, functionCommands } from '../lib/function-commands'
import { bytes } from '../lib/format'
import { visible } from '../lib/visible'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Button, Field } from '../ui/controls'
import { notify } from '../ui/toast'

/** Returns a valid name of a function that is similar to the name of a file. */
const nameOf = (file: File) =>
  file.name
    .replace(/\.[^.]*$/, '')
    .toLowerCase()
    .replace(/[^a-z0-9]+/g, '-')
    .replace(/^-+|-+$/g, '')
    .slice(0, 48)

/** Parses lines of the form `KEY=value`. */
function pairs(text: string): Record<string, string> | undefined {
  const lines = text.split('\n').filter((line) => line.includes('='))
  if (lines.length === 0) return undefined
  return Object.fromEntries(lines.map((line) => [line.slice(0, line.indexOf('=')), line.slice(line.indexOf('=') + 1)]))
}

/** Deploys a module as a new function, or as a new version of the function `fn`. */
export function DeployDialog({
  fn,
  file: dropped,
  onClose,
  onDone,
}: {
  fn?: Schemas['Function']
  file?: File
  onClose: () => void
  onDone: (name: string) => void
}) {
  const queries = useQueryClient()
  const picker = useRef<HTMLInputElement>(null)
  const [file, setFile] = useState(dropped)
  const [isOver, setOver] = useState(false)
  const [form, setForm] = useState({
    name: fn?.name ?? (dropped ? nameOf(dropped) : ''),
    access: '',
    memory: '',
    cpu: '',
    timeout: '',
    concurrency: '',
    env: '',
    allow: '',
    schedule: fn?.schedule?.cron ?? '',
  })
  const set = (key: keyof typeof form) => (event: { target: { value: string } }) =>
    setForm({ ...form, [key]: event.target.value })
  const choose = (next: File | undefined) => {
    if (!next) return
    setFile(next)
    setForm((old) => (old.name ? old : { ...old, name: nameOf(next) }))
  }
  const numbers = { memoryMB: form.memory, cpuMs: form.cpu, timeoutMs: form.timeout, concurrency: form.concurrency }
  const limits = Object.entries(numbers).filter(([, value]) => value !== '')
  const allow = form.allow.split(/[\s,]+/).filter(Boolean)
  const env = pairs(form.env)
  const settings: DeploySettings = {
    ...(form.access ? { public: form.access === 'public' } : {}),
    ...(limits.length > 0 ? { limits: Object.fromEntries(limits.map(([k, v]) => [k, Number(v)])) } : {}),
    ...(env ? { env } : {}),
    ...(allow.length > 0 ? { allow } : {}),
    ...(form.schedule !== (fn?.schedule?.cron ?? '') ? { schedule: form.schedule } : {}),
  }
  const run = async () => {
    if (!file) throw new Error('Choose a module')
    const body = new FormData()
    body.set('settings', JSON.stringify(settings))
    body.set('module', file)
    const response = await call(`/api/functions/${encodeURIComponent(form.name)}`, { method: 'POST', body })
    const deployed = (await response.json()) as Schemas['Function']
    notify(`Version ${deployed.version} of ${deployed.name} is active`)
    await queries.invalidateQueries({ queryKey: ['functions'] })
    await queries.invalidateQueries({ queryKey: ['function'] })
  }
  const number = (key: 'memory' | 'cpu' | 'timeout' | 'concurrency', label: string, initial: number) => (
    <Field id={`deploy-${key}`} label={label}>
      <input
        id={`deploy-${key}`}
        className="input"
        type="number"
        min={1}
        placeholder={String(initial)}
        value={form[key]}
        onChange={set(key)}
      />
    </Field>
  )
  return (
    <ConfirmDialog
      title={fn ? `Deploy a version of ${visible(fn.name)}` : 'Deploy a function'}
      label="Deploy"
      wide
      disabled={!file || !form.name}
      command={functionCommands.deploy(form.name || 'NAME', settings, file?.name ?? 'function.wasm')}
      onClose={onClose}
      onDone={() => onDone(form.name)}
      run={run}>
      <div
        className="drop-zone"
        data-over={isOver}
        onDragOver={(e) => {
          e.preventDefault()
          e.stopPropagation()
          setOver(true)
        }}
        onDragLeave={() => setOver(false)}
        onDrop={(e) => {
          e.preventDefault()
          e.stopPropagation()
          setOver(false)
          choose(e.dataTransfer.files[0])
        }}>
        <span className="truncate">
          {file ? (
            <>
              <strong>{visible(file.name)}</strong>, {bytes(file.size)}
            </>
          ) : (
            'Drop a module here (.wasm)'
          )}
        </span>
        <Button small icon="upload" onClick={() => picker.current?.click()}>
          {file ? 'Choose another file' : 'Choose a file'}
        </Button>
        <input
          ref={picker}
          type="file"
          accept=".wasm,application/wasm"
          aria-label="Module"
          hidden
          onChange={(e) => choose(e.target.files?.[0])}
        />
      </div>
      <div className="form-grid">
        <Field id="deploy-name" label="Name" hint="a-z, 0-9 and single hyphens, at most 48 characters">
          <input
            id="deploy-name"
            className="input"
            value={form.name}
            onChange={set('name')}
            disabled={!!fn}
            maxLength={48}
            autoComplete="off"
            spellCheck={false}
          />
        </Field>
        <Field id="deploy-access" label="Access">
          <select id="deploy-access" className="select" value={form.access} onChange={set('access')}>
            <option value="">{fn ? 'as before' : 'with a key'}</option>
            <option value="public">public: without a key</option>
            {fn && <option value="private">with a key</option>}
          </select>
        </Field>
        <Field id="deploy-env" label="Environment" hint="KEY=value, one per line. Values are not shown again">
          <textarea
            id="deploy-env"
            className="textarea mono concealed"
            value={form.env}
            onChange={set('env')}
            spellCheck={false}
          />
        </Field>
        <Field
          id="deploy-allow"
          label="Allowed hosts"
          hint="Hosts to which the function may send requests, one per line">
          <textarea
            id="deploy-allow"
            className="textarea mono"
            value={form.allow}
            onChange={set('allow')}
            spellCheck={false}
          />
        </Field>
        <Field id="deploy-schedule" label="Schedule" hint="Cron format, in UTC. Empty for none">
          <input
            id="deploy-schedule"
            className="input mono"
            value={form.schedule}
            onChange={set('schedule')}
            placeholder="*/5 * * * *"
            spellCheck={false}
          />
        </Field>
      </div>
      <fieldset className="fields">
        <legend>Limits of a request</legend>
        <div className="limits">
          {number('memory', 'Memory in MiB', fn?.limits.memoryMB ?? 128)}
          {number('cpu', 'Processor in ms', fn?.limits.cpuMs ?? 50)}
          {number('timeout', 'Duration in ms', fn?.limits.timeoutMs ?? 30_000)}
          {number('concurrency', 'Simultaneous', fn?.limits.concurrency ?? 64)}
        </div>
      </fieldset>
      {fn && <p className="muted">Empty fields retain their value. An existing sandbox key is revoked.</p>}
    </ConfirmDialog>
  )
}
