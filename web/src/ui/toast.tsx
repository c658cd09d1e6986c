import { useSyncExternalStore } from 'react'
import { visible } from '../lib/visible'
import { Button } from './controls'

interface Toast {
  id: number
  text: string
  isError: boolean
}

let toasts: Toast[] = []
let next = 1
const listeners = new Set<() => void>()

function change(update: Toast[]) {
  toasts = update
  for (const listener of listeners) listener()
}

function dismiss(id: number) {
  change(toasts.filter((toast) => toast.id !== id))
}

/** Shows a message. Errors stay until they are dismissed. */
export function notify(text: string, isError = false) {
  const id = next++
  change([...toasts.slice(-4), { id, text, isError }])
  if (!isError) setTimeout(() => dismiss(id), 4000)
}

export function Toasts() {
  const shown = useSyncExternalStore(
    (listener) => {
      listeners.add(listener)
      return () => listeners.delete(listener)
    },
    () => toasts,
  )
  return (
    <div className="toasts" role="region" aria-label="Messages" aria-live="polite">
      {shown.map((toast) => (
        <div key={toast.id} className={`toast${toast.isError ? ' bad' : ''}`}>
          <span className="grow">{visible(toast.text)}</span>
          <Button look="ghost" small icon="kill" label="Dismiss" onClick={() => dismiss(toast.id)} />
        </div>
      ))}
    </div>
  )
}
