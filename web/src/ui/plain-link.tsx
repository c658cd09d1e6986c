import type { ReactNode } from 'react'
import { useRouter } from '@tanstack/react-router'

/**
 * Link to a page of the console. It is drawn faster than a link of the router, because it does not know
 * whether the page is shown. Long tables have one in each row.
 */
export function PlainLink({ to, title, children }: { to: string; title?: string; children: ReactNode }) {
  const router = useRouter()
  return (
    <a
      href={to}
      title={title}
      onClick={(event) => {
        // The browser opens other clicks in a new tab or window.
        if (event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return
        event.preventDefault()
        router.history.push(to)
      }}>
      {children}
    </a>
  )
}
