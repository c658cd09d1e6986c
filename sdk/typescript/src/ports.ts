// Streams to TCP ports of a guest.
import http from 'node:http'
import https from 'node:https'
import type { Socket } from 'node:net'
import { ConnectionConfig, TimeoutError } from 'e2b'
import type { Connection } from './connection.js'
import { classes } from './errorCodes.js'
import { UnreachableError, errorOf } from './errors.js'

/** Returns a socket that is connected to a port of the sandbox, also on its loopback interface. */
export function openPort(options: Connection, sandboxId: string, port: number): Promise<Socket> {
  const config = new ConnectionConfig(options)
  const url = `${config.apiUrl.replace(/\/+$/, '')}/sandboxes/${encodeURIComponent(sandboxId)}/ports/${port}`
  const headers = { 'X-API-KEY': config.apiKey ?? '', Connection: 'Upgrade', Upgrade: 'tcp' }
  return new Promise((resolve, reject) => {
    const client = url.startsWith('https:') ? https : http
    const request = client.request(url, { headers, agent: false, timeout: config.requestTimeoutMs })
    request.on('upgrade', (_, socket, head) => {
      socket.setTimeout(0)
      // The first bytes of the stream may have arrived together with the response.
      if (head.length > 0) socket.unshift(head)
      resolve(socket as Socket)
    })
    request.on('response', (response) => {
      const pieces: Buffer[] = []
      response.on('data', (piece: Buffer) => pieces.push(piece))
      response.on('error', reject)
      response.on('end', () => {
        const names = Object.entries(response.headers).map(([name, value]) => [name, String(value)] as [string, string])
        reject(errorOf(response.statusCode ?? 0, Buffer.concat(pieces).toString(), new Headers(names), classes))
      })
    })
    request.on('timeout', () => request.destroy(new TimeoutError(`no response for port ${port}`)))
    request.on('error', (error) => {
      const isTimeout = error instanceof TimeoutError
      reject(isTimeout ? error : new UnreachableError(`no response of the daemon: ${error.message}`))
    })
    request.end()
  })
}
