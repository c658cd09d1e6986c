import { createContext, type ReactNode, useContext, useEffect, useState } from 'react'
import { useQueryClient } from '@tanstack/react-query'
import { CallError, callJson, setSignedOut, messageOf } from './api/client'
import { signInCode } from './nonce'
import { Button, Field } from './ui/controls'
import { Logo } from './ui/icons'

export interface Session {
  session: string
  scope: 'owner' | 'admin' | 'create' | 'read'
  keyID: string | null
  keyName: string | null
  version: string
}

const SessionContext = createContext<Session | null>(null)

/** The session of the user. Only components below [SessionGate] may call this function. */
export function useSession(): Session & { isAdmin: boolean; mayChange: boolean } {
  const session = useContext(SessionContext)
  if (!session) throw new Error('no session')
  return {
    ...session,
    isAdmin: session.scope === 'owner' || session.scope === 'admin',
    mayChange: session.scope !== 'read',
  }
}

// The code works once, so the exchange is shared if React renders twice.
let exchange: Promise<Session> | undefined

function firstSession(): Promise<Session> {
  exchange ??= signInCode
    ? callJson<Session>('POST', '/session', { code: signInCode })
    : callJson<Session>('GET', '/session')
  return exchange
}

export function SessionGate({ children }: { children: ReactNode }) {
  const [session, setSession] = useState<Session | null>()
  const [problem, setProblem] = useState<string>()
  const queries = useQueryClient()

  useEffect(() => {
    setSignedOut(() => {
      queries.clear()
      setSession(null)
    })
    let timer: ReturnType<typeof setTimeout> | undefined
    const load = (delay: number) => {
      firstSession().then(setSession, (error: unknown) => {
        exchange = undefined
        if (error instanceof CallError && error.status === 0) {
          setProblem(error.message)
          timer = setTimeout(() => load(Math.min(5000, delay * 2)), delay * (1 + Math.random() / 4))
          return
        }
        if (signInCode && error instanceof CallError) setProblem(error.message)
        else setProblem(undefined)
        setSession(null)
      })
    }
    load(200)
    return () => clearTimeout(timer)
  }, [queries])

  // Extends the lifetime of the cookie while the page is used.
  useEffect(() => {
    if (!session) return
    const timer = setInterval(() => {
      if (!document.hidden) void callJson('GET', '/session').catch(() => {})
    }, 60_000)
    return () => clearInterval(timer)
  }, [session])

  if (session === undefined)
    return problem ? (
      <p className="empty" role="status">
        {problem} Retrying…
      </p>
    ) : null
  if (session === null) return <SignIn problem={problem} onSession={setSession} />
  return <SessionContext.Provider value={session}>{children}</SessionContext.Provider>
}

function SignIn({ problem, onSession }: { problem?: string; onSession: (session: Session) => void }) {
  const [key, setKey] = useState('')
  const [error, setError] = useState(problem)
  const [busy, setBusy] = useState(false)
  const submit = async () => {
    setBusy(true)
    try {
      onSession(await callJson<Session>('POST', '/session', { key }))
    } catch (e) {
      setError(messageOf(e))
    } finally {
      setBusy(false)
    }
  }
  return (
    <main className="sign-in">
      <form
        className="card"
        onSubmit={(event) => {
          event.preventDefault()
          void submit()
        }}>
        <div className="brand">
          <Logo />
          <span>Jiffy</span>
        </div>
        <h1>Sign in</h1>
        <Field
          id="key"
          label="API key"
          problem={error}
          hint="The key is exchanged for a session and is not stored in the browser.">
          <input
            id="key"
            className={`input mono${error ? ' invalid' : ''}`}
            type="password"
            autoComplete="off"
            autoFocus
            spellCheck={false}
            placeholder="e2b_…"
            value={key}
            onChange={(event) => setKey(event.target.value)}
          />
        </Field>
        <Button type="submit" look="primary" busy={busy} disabled={!key.trim()}>
          Sign in
        </Button>
        <p className="muted">
          On the host, <code>jiffy console</code> opens this page without a key.
        </p>
      </form>
    </main>
  )
}
