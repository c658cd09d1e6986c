// Forwards connections between network namespaces, through Unix sockets in a directory.
//
//   forward.mjs serve DIRECTORY PORT... NAME=PATH...
//       connects clients of DIRECTORY/PORT to 127.0.0.1:PORT, and of DIRECTORY/NAME to the socket PATH
//   forward.mjs listen DIRECTORY PORT...
//       connects clients of 127.0.0.1:PORT to DIRECTORY/PORT
//
// Chromium aborts requests when an interface of its network namespace appears or disappears
// (net::ERR_NETWORK_CHANGED), as the daemon's interfaces do. The tests run in a namespace of their own,
// whose processes may not use the socket of the host's owner.
import net from 'node:net'

const [mode, directory, ...words] = process.argv.slice(2)
for (const word of words) {
  const [name, path] = word.split('=')
  const inner = path ? { path } : { host: '127.0.0.1', port: Number(name) }
  const outer = { path: `${directory}/${name}` }
  const [address, target] = mode === 'serve' ? [outer, inner] : [inner, outer]
  const server = net.createServer({ allowHalfOpen: true }, (client) => {
    const upstream = net.connect({ ...target, allowHalfOpen: true })
    client.pipe(upstream).pipe(client)
    client.on('error', () => upstream.destroy())
    upstream.on('error', () => client.destroy())
  })
  server.listen(address)
}
