import { useState } from 'react'
import { consoleHeaders, messageOf, type Schemas } from '../api/client'
import { functionCommands } from '../lib/function-commands'
import { bytes } from '../lib/format'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { Button, Field } from '../ui/controls'

/** Bytes of a response that are shown. */
const MAX_SHOWN = 64 * 1024
const METHODS = ['GET', 'POST', 'PUT', 'PATCH', 'DELETE', 'HEAD']

interface Answer {
  status: number
  ms: number
  headers: [string, string][]
  size: number
  text: string
}

/** Sends a request to the function. The response is shown as text and never executed. */
export function TestRequest({ fn }: { fn: Schemas['Function'] }) {
  const [form, setForm] = useState({ method: 'GET', path: '/', body: '' })
  const [answer, setAnswer] = useState<Answer>()
  const [problem, setProblem] = useState<string>()
  const [busy, setBusy] = useState(false)
  const set = (key: keyof typeof form) => (event: { target: { value: string } }) =>
    setForm({ ...form, [key]: event.target.value })
  const path = form.path.startsWith('/') ? form.path : `/${form.path}`
  const body = ['GET', 'HEAD'].includes(form.method) || !form.body ? undefined : form.body
  const send = async () => {
    setBusy(true)
    setProblem(undefined)
    const begin = performance.now()
    try {
      const url = new URL(`/api/functions/${encodeURIComponent(fn.name)}/invoke${path}`, location.origin)
      const headers: Record<string, string> = { ...consoleHeaders }
      if (body !== undefined) headers['content-type'] = 'text/plain'
      const response = await fetch(url, { method: form.method, headers, body, redirect: 'manual' })
      const data = await response.arrayBuffer()
      setAnswer({
        status: response.status,
        ms: performance.now() - begin,
        headers: [...response.headers],
        size: data.byteLength,
        text: new TextDecoder().decode(data.slice(0, MAX_SHOWN)),
      })
    } catch (e) {
      setAnswer(undefined)
      setProblem(messageOf(e))
    } finally {
      setBusy(false)
    }
  }
  return (
    <div className="details">
      <form
        className="card"
        onSubmit={(e) => {
          e.preventDefault()
          void send()
        }}>
        <div className="card-head">
          <h2>Request</h2>
        </div>
        <div className="card-body stack">
          <div className="request-line">
            <Field id="test-method" label="Method">
              <select id="test-method" className="select" value={form.method} onChange={set('method')}>
                {METHODS.map((method) => (
                  <option key={method}>{method}</option>
                ))}
              </select>
            </Field>
            <Field id="test-path" label="Path and query">
              <input
                id="test-path"
                className="input mono"
                value={form.path}
                onChange={set('path')}
                autoComplete="off"
                spellCheck={false}
              />
            </Field>
          </div>
          {!['GET', 'HEAD'].includes(form.method) && (
            <Field id="test-body" label="Body">
              <textarea
                id="test-body"
                className="textarea mono"
                value={form.body}
                onChange={set('body')}
                spellCheck={false}
              />
            </Field>
          )}
          <AsCommand command={functionCommands.invoke(fn.name, form.method, path, body)} />
          <div>
            <Button type="submit" look="primary" icon="play" busy={busy} disabled={fn.state !== 'enabled'}>
              Send
            </Button>
            {fn.state !== 'enabled' && <span className="muted"> The function is disabled.</span>}
          </div>
        </div>
      </form>
      <section className="card" aria-label="Response" aria-live="polite">
        <div className="card-head">
          <h2>Response</h2>
          {answer && (
            <span className="row">
              <span className={`badge ${answer.status < 400 ? 'good' : 'bad'}`}>{answer.status || 'redirect'}</span>
              <span className="muted nowrap">
                {Math.round(answer.ms)} ms, {bytes(answer.size)}
              </span>
            </span>
          )}
        </div>
        <div className="card-body stack">
          {!answer && !problem && <span className="muted">Send a request to see its response.</span>}
          {problem && <p className="problem">{visible(problem)}</p>}
          {answer && (
            <>
              <dl className="facts">
                {answer.headers.map(([header, value], index) => (
                  <div key={index} className="contents">
                    <dt>{visible(header)}</dt>
                    <dd>{visible(value)}</dd>
                  </div>
                ))}
              </dl>
              <pre className="paste mono" tabIndex={0} aria-label="Body of the response">
                {visible(answer.text)}
                {answer.size > MAX_SHOWN && `\n… ${bytes(answer.size - MAX_SHOWN)} more`}
              </pre>
            </>
          )}
        </div>
      </section>
    </div>
  )
}
