import './nonce'
import { StrictMode } from 'react'
import { createRoot } from 'react-dom/client'
import { QueryClient, QueryClientProvider } from '@tanstack/react-query'
import { RouterProvider } from '@tanstack/react-router'
import { CallError } from './api/client'
import { createAppRouter } from './router'
import { SessionGate } from './session'
import './ui/theme'
import './styles/base.css'
import './styles/layout.css'
import './styles/controls.css'
import './styles/table.css'
import './styles/pages.css'

const queries = new QueryClient({
  defaultOptions: {
    queries: {
      // Retry only after a lost connection. Rejections are shown immediately.
      retry: (count, error) => error instanceof CallError && error.status === 0 && count < 60,
      retryDelay: (attempt) => Math.min(5000, 200 * 2 ** attempt) * (1 + Math.random() / 4),
      networkMode: 'always',
    },
    mutations: { networkMode: 'always' },
  },
})
const router = createAppRouter()
const root = document.getElementById('root')
if (root) {
  createRoot(root).render(
    <StrictMode>
      <QueryClientProvider client={queries}>
        <SessionGate>
          <RouterProvider router={router} />
        </SessionGate>
      </QueryClientProvider>
    </StrictMode>,
  )
}
