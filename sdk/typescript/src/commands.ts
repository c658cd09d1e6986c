// Commands that end when their caller aborts them.
import type { Commands } from 'e2b'

type Options = { signal?: AbortSignal; background?: boolean }
type Handle = { kill(): Promise<boolean>; wait(): Promise<unknown> }

/** Makes `run` kill the command when its signal is aborted. */
export function commandsThatEnd(commands: Commands): void {
  const run = commands.run.bind(commands) as (command: string, options?: Options) => Promise<unknown>
  const runAndEnd = async (command: string, options?: Options): Promise<unknown> => {
    if (!options?.signal || options.background) return run(command, options)
    const { signal, ...rest } = options
    signal.throwIfAborted()
    const handle = (await run(command, { ...rest, background: true })) as Handle
    let killed: Promise<unknown> | undefined
    // An error means that the command has ended, or that the sandbox does not exist.
    const abort = () => (killed ??= handle.kill().catch(() => false))
    signal.addEventListener('abort', abort, { once: true })
    try {
      if (signal.aborted) abort()
      return await handle.wait()
    } catch (error) {
      if (!signal.aborted) throw error
      await killed
      throw signal.reason
    } finally {
      signal.removeEventListener('abort', abort)
    }
  }
  commands.run = runAndEnd as Commands['run']
}
