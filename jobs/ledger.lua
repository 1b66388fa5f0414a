-- The ledger's key layout, and the prelude of its scripts, which are in ledger_jobs.lua, ledger_requests.lua,
-- ledger_tenants.lua and ledger_fleet.lua. ledger_scripts.py cuts those files at the `--@` lines: a script is the prelude and one
-- section. Every script may run twice (clients repeat what they got no answer to), the second time even late:
-- the comments that begin with 'Twice' say what makes that safe.
--
-- All keys are `{<namespace>}:...`: one hash tag, one slot. Times are ms. m is a model's fingerprint, t a
-- tenant, rid is "<job id>:<row>", an entry is "<ms enqueued>|<rid>". A script gets its keys but for those of
-- tenants, whose names it makes of a key it got and the tenant.
--   requests:<m>       HASH rid -> PlannedRequest JSON: all that is queued or leased, so HLEN is the model's
--                      depth
--   queue:<m>:<bucket>:<t>
--                      LIST of entries. Invariant: a request without an owner has an entry here or in
--                      suspects. An entry without a request, or of one with an owner, is stale: dropped where
--                      it is met
--   turns:<m>          ZSET t -> turn: all tenants with a queue that is not empty; the lowest is next
--   given:<m>          HASH t -> the turn it is due at for what it was given; '' -> the turn that was last
--   suspects:<m>       LIST of entries: requests that were running when their worker died. They run apart
--   owners:<m>         HASH rid -> "<token>|<bucket>|<ms enqueued>|<t>": who leased it
--   leases:<m>         ZSET rid -> expiry
--   running:<m>        SET of leased rids that were started. alone:<m> SET of those claimed alone
--   attempts:<m>       HASH rid -> workers that died running it. kills:<m> those that died running it alone
--   drain:<m>          the worker that claims nothing until it is idle, for the suspects' sake
--   reaped:<m>         HASH at, until: the last reap, and the end of the grace that follows a time without
--                      any
--   job:<id>           HASH of the Job and the state of its plan and feed
--   live:<id>          SET of its rids in requests:<m>
--   done:<id>          bitmap of finished rows
--   parts:<id>         LIST of PartEntry JSON. part_index:<id> HASH part name -> place in it
--   shards:<id>        LIST of shard names
--   control            HASH unit ("plan:<id>") -> "<rank>|<t>": all open units, so HLEN is the depth of
--                      control. The rank is by priority, then deadline
--   ready_<kind>:<t>   ZSET unit -> rank: those that may be claimed now
--   ready_<kind>       ZSET t -> turn: the tenants that have such units; the lowest of all kinds is next
--   unit_given         HASH "<kind>:<t>" -> the turn it is due at; '' -> the turn that was last
--   later              ZSET unit -> when it may be claimed: those delayed, or leased until then
--   unit_owners        HASH unit -> token. unit_attempts HASH unit -> claims since its last release
--   unit_failures      HASH unit -> "<how often in a row>|<why>", of open units that failed when they ran last
--   feeding            SET of job ids with an open feed unit
--   open:<t>           ZSET job id -> inf, or until when its place in the quotas is kept for it to be entered
--   open_requests, open_tokens
--                      HASH job id -> what of it is not finished: as its file looks, then as the plan found
--   rate:<t>           when the requests that were let through are paid off, at the tenant's rate
--   uploads:<t>        ZSET "<id>|<bytes>" -> until when they count: files that are being stored
--   deadlines          ZSET job id -> expiry: jobs that can still expire
--   models             SET of fingerprints
--   work               HASH "<what>:<m>" -> number, for scaling. Of what is left: unfed (requests not in Redis
--                      yet), tokens (of prompts, once a job is planned; also left_unfed and left_tokens in
--                      job:<id>). Of what has finished, ever: finished (rows), prompt, completion (tokens).
--                      Of workers, as seen last: rate (tokens a second), startup (seconds).
--                      turn: "<autoscaler>|<ms>", which one changes the number of workers, and until when;
--                      turn:load: "<worker>|<ms>", which one loads the model for the few that wait
--   workers            HASH worker -> "<ms of its last report>|<facts JSON>"
--   retiring           SET of workers that are to end once they hold nothing
--   fed_bytes          bytes of all payloads in requests:*
--   epoch              the last fencing epoch
--   generation         random: another after a loss of all without a restart
--   recovered          the run of Redis after whose start jobs were brought back from the store
--   claims:<token>     the answer to a claim or a reap, for a minute, so that a retry gets the same

--@ prelude
local call = redis.call
local key, queue, buckets = {}, {}, {}
for _, name in ipairs(KEYS) do
  local kind, rest = string.match(name, '^{.-}:([%l_]+):?(.*)$')
  local bucket = kind == 'queue' and string.match(rest, '%d+$')
  if bucket then
    queue[bucket] = name
    buckets[#buckets + 1] = bucket
  else
    key[kind] = name
  end
end
local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local id, lost = ARGV[1], redis.error_reply('LEASELOST')
local terminal = {completed = true, failed = true, cancelled = true, expired = true}
local open = {validating = true, in_progress = true}

-- A full Redis refuses the first write of a script if it takes memory, but not what follows a write that
-- takes none. Whatever brings work to its end must pass, or memory would never come free: all but create,
-- begin_plan, add_shards and feed.
local function even_when_full()
  call('HDEL', key.control, '')
end

local function field(name)
  return call('HGET', key.job, name) or ''
end

local function number(name)
  return tonumber(call('HGET', key.job, name) or 0)
end

-- One call per thousand members: what unpack can take is limited.
local function many(command, target, members)
  local answers = {}
  for first = 1, #members, 1000 do
    local answer = call(command, target, unpack(members, first, math.min(first + 999, #members)))
    if type(answer) == 'table' then
      for _, item in ipairs(answer) do answers[#answers + 1] = item end
    end
  end
  return answers
end

-- Time never runs backwards over a job's stamps, whatever the clocks do.
local function move(state)
  local at = string.format('%.17g', math.max(now / 1000, number('stamped')))
  call('HSET', key.job, 'state', state, state .. '_at', at, 'stamped', at)
end

-- How many requests of a job may be in Redis: few at first, since all that comes later waits behind them. As many
-- wait as run, so that a fleet of any size finds work, however long a request takes.
local function window(most)
  local running = key.owners and call('HLEN', key.owners) or 0
  return math.min(tonumber(most), math.max(number('window'), 128, 2 * running))
end

local function illegal(state)
  return redis.error_reply('ILLEGAL ' .. field('state') .. ' ' .. state)
end

local function owns(kind, token)
  return call('HGET', key.unit_owners, kind .. ':' .. id) == token
end

-- Start-time fair queueing (Goyal et al. 1996): who was given n is due n turns later; who joins begins at the
-- turn that was last, or behind what it was given since, so that leaving and coming back gains nothing.
local function join(turns, given, name, tenant)
  local last = tonumber(call('HGET', given, '') or 0)
  call('ZADD', turns, 'NX', math.max(last, tonumber(call('HGET', given, name) or 0)), tenant)
end

local function give(turns, given, name, tenant, count)
  local turn = tonumber(call('ZSCORE', turns, tenant)) + count
  call('ZADD', turns, turn, tenant)
  call('HSET', given, name, turn)
end

-- Who has no queue any more takes no turns.
local function leave(tenant)
  local names = {}
  for place, bucket in ipairs(buckets) do names[place] = queue[bucket] .. ':' .. tenant end
  if call('EXISTS', unpack(names)) == 0 then call('ZREM', key.turns, tenant) end
end

local kinds = {'finalize', 'feed', 'plan'}

local function place_of(unit)
  local rank, tenant = string.match(call('HGET', key.control, unit) or '', '^(.-)|(.*)$')
  local ready = key['ready_' .. string.match(unit, '^%l+')]
  return rank, tenant, ready
end

local function make_ready(unit)
  local rank, tenant, ready = place_of(unit)
  if not rank then return end
  call('ZADD', ready .. ':' .. tenant, rank, unit)
  join(ready, key.unit_given, string.match(unit, '^%l+:') .. tenant, tenant)
end

local function unready(unit)
  local rank, tenant, ready = place_of(unit)
  if not rank then return end
  call('ZREM', ready .. ':' .. tenant, unit)
  if call('EXISTS', ready .. ':' .. tenant) == 0 then call('ZREM', ready, tenant) end
end

local function open_unit(kind)
  local unit = kind .. ':' .. id
  if call('HSETNX', key.control, unit, field('rank') .. '|' .. field('tenant')) == 1 then
    make_ready(unit)
    if kind == 'feed' then call('SADD', key.feeding, id) end
  end
end

local function close_unit(kind)
  local unit = kind .. ':' .. id
  unready(unit)
  call('HDEL', key.control, unit)
  call('HDEL', key.unit_owners, unit)
  call('HDEL', key.unit_attempts, unit)
  call('HDEL', key.unit_failures, unit)
  call('ZREM', key.later, unit)
  if kind == 'feed' then call('SREM', key.feeding, id) end
  if call('EXISTS', key.control) == 0 then call('DEL', key.unit_given) end
end

-- Make a unit that waits for its delay due at once; a leased one is left alone.
local function hasten(kind)
  local unit = kind .. ':' .. id
  if call('HEXISTS', key.unit_owners, unit) == 0 then
    call('ZADD', key.later, 'XX', now, unit)
  end
end

local function next_epoch()
  local epoch = math.max(tonumber(call('GET', key.epoch) or 0) + 1, now)
  call('SET', key.epoch, epoch)
  return epoch
end

-- Remove requests of this job from Redis. Bytes are counted from what is really removed, so twice is
-- harmless.
local function forget(rids)
  local bytes = 0
  for _, rid in ipairs(rids) do
    bytes = bytes + call('HSTRLEN', key.requests, rid)
    call('HDEL', key.requests, rid)
  end
  for _, name in ipairs({'owners', 'attempts', 'kills'}) do many('HDEL', key[name], rids) end
  for _, name in ipairs({'running', 'alone', 'live'}) do many('SREM', key[name], rids) end
  many('ZREM', key.leases, rids)
  if call('EXISTS', key.requests) == 0 then call('DEL', key.given) end
  call('DECRBY', key.fed_bytes, bytes)
  call('HINCRBY', key.job, 'live_bytes', 0 - bytes)  -- in Lua -0 is '-0', which is no integer to Redis
end

-- Remove the job's entries from a queue, keeping the order of the others.
local function sweep(list)
  local kept, mark, all = {}, '|' .. id .. ':', call('LRANGE', list, 0, -1)
  for _, entry in ipairs(all) do
    if not string.find(entry, mark, 1, true) then kept[#kept + 1] = entry end
  end
  if #kept < #all then
    call('DEL', list)
    many('RPUSH', list, kept)
  end
end

-- Take back every request of the job, queued or leased: from here on nothing of it runs or completes.
local function revoke()
  local rids = call('SMEMBERS', key.live)
  if #rids == 0 then return end
  forget(rids)
  for _, bucket in ipairs(buckets) do sweep(queue[bucket] .. ':' .. field('tenant')) end
  sweep(key.suspects)
  leave(field('tenant'))
end

-- A job's payloads lie under its fingerprint: a caller that passed another model's keys is told to come
-- again.
local function other_model(given)
  local is = field('fingerprint')
  if is ~= given then return redis.error_reply('OTHERMODEL ' .. is) end
end

-- A job that recovery brings back is held until its parts are in: the time until which, while that goes on.
local function held()
  local unit, token = 'plan:' .. id, field('recovering')
  local until_ = tonumber(call('ZSCORE', key.later, unit) or 0)
  if token ~= '' and owns('plan', token) and until_ > now then return until_ end
end

-- What is left of a job is counted for its model, too.
local function left(what, change)
  call('HINCRBY', key.job, 'left_' .. what, change)
  call('HINCRBY', key.work, what .. ':' .. field('fingerprint'), change)
end

local function none_left()
  for _, what in ipairs({'unfed', 'tokens'}) do
    local rest = number('left_' .. what)
    if rest ~= 0 then left(what, 0 - rest) end
  end
end

-- Its quota is free again for others of the tenant, and nothing of it is left to do.
local function free()
  if key.job then none_left() end
  call('HDEL', key.open_requests, id)
  call('HDEL', key.open_tokens, id)
end

local function finalize(state, outcome)
  local until_ = held()
  move(state)
  free()
  call('HSET', key.job, 'outcome', outcome)
  call('ZREM', key.deadlines, id)
  close_unit('plan')
  close_unit('feed')
  open_unit('finalize')
  if until_ then
    unready('finalize:' .. id)
    call('ZADD', key.later, until_, 'finalize:' .. id)
  end
end

-- The check that ends a job's work. Every script that can make it true calls it.
local function settle()
  if field('state') ~= 'in_progress' or field('planned') ~= '1' then return end
  if number('cursor') < call('LLEN', key.shards) then return end
  close_unit('feed')
  if call('SCARD', key.live) == 0 then finalize('finalizing', 'completed') end
end

local function forget_job(seconds)
  for _, kind in ipairs(kinds) do close_unit(kind) end
  free()
  call('ZREM', key.open .. ':' .. field('tenant'), id)
  call('ZREM', key.deadlines, id)
  call('DEL', key.live, key.done, key.parts, key.part_index, key.shards)
  call('EXPIRE', key.job, seconds)
end

-- Owner values and queue entries: "<token>|<bucket>|<ms>|<tenant>" and "<ms>|<rid>".
local function owner_of(rid)
  local value = call('HGET', key.owners, rid)
  if value then return string.match(value, '^(.-)|(%d+)|(%d+)|(.*)$') end
end

local function lease(rid, token, bucket, enqueued, tenant, until_)
  call('HSET', key.owners, rid, table.concat({token, bucket, enqueued, tenant}, '|'))
  call('ZADD', key.leases, until_, rid)
end

local function unlease(rid)
  call('HDEL', key.owners, rid)
  call('ZREM', key.leases, rid)
  return call('SREM', key.running, rid) == 1, call('SREM', key.alone, rid) == 1
end

local function suspected(rid)
  return call('HEXISTS', key.attempts, rid) == 1
end

-- Requests that go back to the head of where they were, in the order they are given: noted, then put.
local back = {}

local function give_back(rid, bucket, ms, tenant)
  local apart = suspected(rid)
  local list = apart and key.suspects or queue[bucket] .. ':' .. tenant
  back[list] = back[list] or {tenant = not apart and tenant}
  table.insert(back[list], ms .. '|' .. rid)
end

local function put_back()
  for list, entries in pairs(back) do
    for place = #entries, 1, -1 do call('LPUSH', list, entries[place]) end
    if entries.tenant then join(key.turns, key.given, entries.tenant, entries.tenant) end
  end
end

-- The answer to a claim: those of `entries` that `token` still owns.
local function granted(token, record)
  local rids, enqueued, payloads, attempts = {}, {}, {}, {}
  for _, entry in ipairs(record.entries) do
    local ms, rid = string.match(entry, '^(%d+)|(.*)$')
    if owner_of(rid) == token then
      rids[#rids + 1], enqueued[#enqueued + 1] = rid, ms
    end
  end
  for _, tries in ipairs(many('HMGET', key.attempts, rids)) do
    attempts[#attempts + 1] = tonumber(tries or 0)
  end
  payloads = many('HMGET', key.requests, rids)
  return {record.bucket, record.alone, record.epoch, enqueued, attempts, payloads, record.requeued}
end

local function remember(record, milliseconds)
  call('SET', key.claims, cmsgpack.pack(record), 'PX', milliseconds)
end

local function remembered()
  local record = call('GET', key.claims)
  if record then return cmsgpack.unpack(record) end
end
