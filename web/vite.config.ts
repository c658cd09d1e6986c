import react from '@vitejs/plugin-react'
import { defineConfig } from 'vite'

// The address of a daemon's console, for `npm run dev`.
const target = process.env.JIFFY_CONSOLE ?? 'http://127.0.0.1:3001'

// The console accepts only its own `Host` and `Origin`.
const proxy = {
  target,
  changeOrigin: true,
  ws: true,
  configure(server: { on(event: string, listener: (request: any) => void): void }) {
    const own = (request: any) => {
      request.setHeader('origin', target)
      request.removeHeader('sec-fetch-site')
    }
    server.on('proxyReq', own)
    server.on('proxyReqWs', own)
  },
}

export default defineConfig({
  plugins: [react()],
  server: {
    port: 5173,
    proxy: Object.fromEntries(['/api', '/session', '/guest', '/live', '/download'].map((path) => [path, proxy])),
  },
  build: {
    outDir: 'dist',
    // `dist/.gitignore` is a file of the repository.
    emptyOutDir: false,
    // The policy of the page permits no inline script and no data URL of a script.
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    target: 'es2023',
  },
})
