// Builds the page into `dist` and compresses its files, which `crates/console` embeds.
import { execFileSync } from 'node:child_process'
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { join } from 'node:path'
import { brotliCompressSync, constants, gzipSync } from 'node:zlib'
import { build } from 'vite'

process.chdir(import.meta.dirname)
generateTypes()
if (process.argv.includes('--types')) process.exit()
for (const name of readdirSync('dist')) {
  if (name !== '.gitignore') rmSync(join('dist', name), { recursive: true })
}
await build({ logLevel: 'warn' })
let total = 0
for (const name of readdirSync('dist/assets')) {
  const path = join('dist/assets', name)
  const plain = readFileSync(path)
  const brotli = brotliCompressSync(plain, {
    params: { [constants.BROTLI_PARAM_QUALITY]: 11, [constants.BROTLI_PARAM_SIZE_HINT]: plain.length },
  })
  writeFileSync(`${path}.br`, brotli)
  writeFileSync(`${path}.gz`, gzipSync(plain, { level: 9 }))
  total += brotli.length
}
console.log(`console: ${Math.round(total / 1024)} KB with Brotli`)

/** Generates the types of the API's calls from its document. */
function generateTypes() {
  mkdirSync('src/api', { recursive: true })
  execFileSync(
    process.execPath,
    [
      'node_modules/openapi-typescript/bin/cli.js',
      'openapi.json',
      '-o',
      'src/api/schema.d.ts',
      '--default-non-nullable',
      'false',
    ],
    { stdio: ['ignore', 'ignore', 'inherit'] },
  )
}
