// Prints the requests that the types of the npm package `e2b` describe, in the form of
// `clients.py`: by method and path, the query parameters, headers and fields of the body.
import { createRequire } from 'node:module'

const require = createRequire(`${process.env.JIFFY_NODE_PACKAGES}/package.json`)
const ts = require('typescript')
const METHODS = new Set(['get', 'put', 'post', 'delete', 'patch'])
// Recursive types end here.
const MAX_DEPTH = 8

const file = `${process.env.JIFFY_NODE_PACKAGES}/node_modules/e2b/dist/index.d.ts`
const program = ts.createProgram([file], { skipLibCheck: true, strict: true })
const checker = program.getTypeChecker()
const source = program.getSourceFile(file)

/** Returns the type of a property without `undefined`. */
function typeOf(property) {
  return checker.getNonNullableType(checker.getTypeOfSymbolAtLocation(property, source))
}

function member(type, name) {
  const property = type && checker.getPropertyOfType(type, name)
  return property && typeOf(property)
}

function isObject(type) {
  return (type.flags & ts.TypeFlags.Object) !== 0 && type.getCallSignatures().length === 0
}

/** Adds the paths of all fields of `type` to `fields`. */
function collect(type, prefix, fields, depth = 0) {
  if (depth > MAX_DEPTH) return
  for (const one of type.isUnionOrIntersection() ? type.types : [type]) {
    if (one.isUnionOrIntersection()) collect(one, prefix, fields, depth + 1)
    if (!isObject(one)) continue
    if (checker.isArrayType(one)) {
      collect(checker.getTypeArguments(one)[0], `${prefix}[]`, fields, depth + 1)
      continue
    }
    const values = one.getStringIndexType()
    if (values) collect(values, `${prefix}.*`, fields, depth + 1)
    for (const property of checker.getPropertiesOfType(one)) {
      const path = `${prefix}.${property.name}`
      fields.add(path)
      collect(typeOf(property), path, fields, depth + 1)
    }
  }
}

const calls = {}
for (const statement of source.statements) {
  if (!ts.isInterfaceDeclaration(statement) || !/^paths(\$\d+)?$/.test(statement.name.text)) continue
  for (const path of checker.getPropertiesOfType(checker.getTypeAtLocation(statement))) {
    if (!path.name.startsWith('/')) continue
    for (const method of checker.getPropertiesOfType(typeOf(path))) {
      const operation = typeOf(method)
      if (!METHODS.has(method.name) || !isObject(operation)) continue
      const parameters = member(operation, 'parameters')
      const names = (kind) => {
        const type = member(parameters, kind)
        return type ? checker.getPropertiesOfType(type).map((property) => property.name) : []
      }
      const fields = new Set()
      const body = member(member(member(operation, 'requestBody'), 'content'), 'application/json')
      if (body) collect(body, 'body', fields)
      calls[`${method.name.toUpperCase()} ${path.name}`] = {
        query: names('query'), headers: names('header'), body: [...fields],
      }
    }
  }
}
console.log(JSON.stringify(calls, null, 1))
