-- Scripts on jobs and their units. The key layout and the prelude are in ledger.lua.

--@ look
-- Commands, one for each key. Not a transaction, which a full Redis refuses even if it only reads. Of our own:
-- TENANTS counts those that have turns, QUEUED what they have in a bucket.
local answers, tenants = {}, {}
local function queued(bucket)
  local count = 0
  for _, tenant in ipairs(tenants) do count = count + call('LLEN', bucket .. ':' .. tenant) end
  return count
end
for place, name in ipairs(KEYS) do
  if ARGV[place] == 'TENANTS' then
    tenants = call('ZRANGE', name, 0, -1)
    answers[place] = #tenants
  elseif ARGV[place] == 'QUEUED' then
    answers[place] = queued(name)
  else
    answers[place] = call(ARGV[place], name)
  end
end
return answers

--@ create
-- id, tenant, priority, created_at, expires_at (s), rank, token, lease ms of a recovery or 0. Returns an epoch;
-- 0: somebody else created it. Twice: `creator` has the token.
if call('EXISTS', key.job) == 1 then
  if field('creator') == ARGV[7] then return number('created_epoch') end
  return 0
end
local epoch = next_epoch()
call('HSET', key.job, 'id', id, 'state', 'validating', 'tenant', ARGV[2], 'priority', ARGV[3],
  'created_at', ARGV[4], 'stamped', ARGV[4], 'expires_at', ARGV[5], 'rank', ARGV[6],
  'creator', ARGV[7], 'created_epoch', epoch)
call('ZADD', key.deadlines, ARGV[5] * 1000, id)
call('ZADD', key.open .. ':' .. ARGV[2], 'inf', id)
open_unit('plan')
if tonumber(ARGV[8]) > 0 then
  call('HSET', key.job, 'recovering', ARGV[7])
  unready('plan:' .. id)
  call('ZADD', key.later, now + ARGV[8], 'plan:' .. id)
  call('HSET', key.unit_owners, 'plan:' .. id, ARGV[7])
end
return epoch

--@ cancel
-- id, fingerprint. Twice: the state is not open any more, and is returned.
even_when_full()
local state = field('state')
if not open[state] then return state end
local other = other_model(ARGV[2])
if other then return other end
revoke()
finalize('cancelling', 'cancelled')
return 'cancelling'

--@ expire
-- id, fingerprint. A job whose work is over (finalizing, cancelling) ends as what it is.
-- Twice: the job is expiring already, which is the same answer.
even_when_full()
local state = field('state')
if not open[state] then
  call('ZREM', key.deadlines, id)
  return (state == 'finalizing' and field('outcome') == 'expired') and 1 or 0
end
if number('expires_at') * 1000 > now or held() then return 0 end
local other = other_model(ARGV[2])
if other then return other end
revoke()
finalize('finalizing', 'expired')
return 1

--@ due_jobs
return call('ZRANGEBYSCORE', key.deadlines, '-inf', now, 'LIMIT', 0, 100)

--@ claim_unit
-- job id or '', token, kinds as "plan,feed", lease ms, remember ms, jobs whose tenants get no plan...
-- Twice: the record gives the same answer; a unit only while the token owns it.
-- Tenants take turns, whatever the kind; of a tenant's units that of the lowest rank is first.
even_when_full()
local token = ARGV[2]
local record = remembered()
if record then
  local mine = record.unit and call('HGET', key.unit_owners, record.unit) == token
  return mine and {record.unit, record.epoch, record.attempts}
end
for _, unit in ipairs(call('ZRANGEBYSCORE', key.later, '-inf', now, 'LIMIT', 0, 1000)) do
  call('ZREM', key.later, unit)
  make_ready(unit)
end

local function of_job(kind)
  local unit = kind .. ':' .. id
  local rank, tenant, ready = place_of(unit)
  if not rank then return end
  local due = tonumber(call('ZSCORE', key.later, unit) or 'inf') <= now
  if due or call('ZSCORE', ready .. ':' .. tenant, unit) then return unit, tonumber(rank), tenant end
end

local passed = {}
for place = 6, #ARGV do
  local _, tenant = place_of('plan:' .. ARGV[place])
  if tenant then passed[tenant] = true end
end

local function next_of(kind)
  local ready = key['ready_' .. kind]
  local turns = call('ZRANGE', ready, 0, #ARGV - 5, 'WITHSCORES')
  for place = 1, #turns, 2 do
    local tenant = turns[place]
    if kind ~= 'plan' or not passed[tenant] then
      return call('ZRANGE', ready .. ':' .. tenant, 0, 0)[1], tonumber(turns[place + 1]), tenant
    end
  end
end

local chosen, least, whose
for _, kind in ipairs(kinds) do
  if string.find(ARGV[3], kind, 1, true) then
    local unit, order, tenant = (id ~= '' and of_job or next_of)(kind)
    if unit and (not least or order < least) then chosen, least, whose = unit, order, tenant end
  end
end
if not chosen then
  remember({}, ARGV[5])
  return false
end
local kind = string.match(chosen, '^%l+')
if id == '' then
  call('HSET', key.unit_given, '', least)
  give(key['ready_' .. kind], key.unit_given, kind .. ':' .. whose, whose, 1)
end
unready(chosen)
call('ZADD', key.later, now + ARGV[4], chosen)
call('HSET', key.unit_owners, chosen, token)
local epoch = next_epoch()
local attempts = call('HINCRBY', key.unit_attempts, chosen, 1)
remember({unit = chosen, epoch = epoch, attempts = attempts}, ARGV[5])
return {chosen, epoch, attempts}

--@ extend_unit
-- id, kind, token, lease ms. A lease that ran out but that nobody took may be extended.
even_when_full()
if not owns(ARGV[2], ARGV[3]) then return 0 end
local unit = ARGV[2] .. ':' .. id
unready(unit)
call('ZADD', key.later, now + ARGV[4], unit)
return 1

--@ release_unit
-- id, kind, token, delay ms, why it failed or ''. Returns how often in a row it has failed, 0 for what is lost.
-- Twice: the token owns nothing any more.
even_when_full()
if field('recovering') == ARGV[3] then
  call('HDEL', key.job, 'recovering')
  hasten('finalize')  -- cancelled meanwhile: it waited for us
end
local unit = ARGV[2] .. ':' .. id
local failures = tonumber(string.match(call('HGET', key.unit_failures, unit) or '0', '^%d+'))
if not owns(ARGV[2], ARGV[3]) then return failures end
call('HDEL', key.unit_owners, unit)
call('HDEL', key.unit_attempts, unit)
unready(unit)
call('ZADD', key.later, now + ARGV[4], unit)
if ARGV[5] == '' then
  call('HDEL', key.unit_failures, unit)
  return 0
end
call('HSET', key.unit_failures, unit, (failures + 1) .. '|' .. ARGV[5])
return failures + 1

--@ begin_plan
-- id, fingerprint before, token, total, model, fingerprint. Twice, even after shards were added: `begun` has
-- the token. A plan that starts over drops the shards of the one before: what was fed lives on and is not fed
-- again.
if not owns('plan', ARGV[3]) or not open[field('state')] then return lost end
if field('begun') == ARGV[3] then return 1 end
local other = other_model(ARGV[2])
if other then return other end
if ARGV[2] ~= ARGV[6] then revoke() end
none_left()
call('DEL', key.shards)
call('HSET', key.job, 'begun', ARGV[3], 'total', ARGV[4], 'model', ARGV[5], 'fingerprint', ARGV[6],
  'cursor', 0, 'offset', 0, 'planned_requests', 0)
call('HSET', key.open_requests, id, ARGV[4] - number('completed') - number('failed'))
call('SADD', key.models, ARGV[6])
return 1

--@ add_shards
-- id, token, requests in them, names... Twice: names are unique, and one that is in the list is not added
-- again.
if not owns('plan', ARGV[2]) or not open[field('state')] or field('begun') ~= ARGV[2] then return lost end
local added = 0
for place = 4, #ARGV do
  if not call('LPOS', key.shards, ARGV[place]) then
    call('RPUSH', key.shards, ARGV[place])
    added = added + 1
  end
end
if added == 0 then return 1 end
call('HINCRBY', key.job, 'planned_requests', ARGV[3])
left('unfed', ARGV[3])
if field('state') == 'validating' then move('in_progress') end
open_unit('feed')
hasten('feed')
return 1

--@ end_plan
-- id, token, requests in all shards or '', their prompt tokens. Twice: `ended` has the token. With fewer
-- requests here than the planner released, Redis restarted meanwhile without its last second: the plan must
-- start over.
even_when_full()
if field('ended') == ARGV[2] then return 1 end
if not owns('plan', ARGV[2]) or not open[field('state')] or field('begun') ~= ARGV[2] then return lost end
if ARGV[3] ~= '' and number('planned_requests') ~= tonumber(ARGV[3]) then return lost end
if field('state') == 'validating' then move('in_progress') end
call('HSET', key.job, 'planned', 1, 'ended', ARGV[2])
call('HSET', key.open_tokens, id, ARGV[4] - number('prompt'))
left('tokens', math.max(0, ARGV[4] - number('prompt')) - number('left_tokens'))
close_unit('plan')
settle()
return 1

--@ fail
-- id, token, seconds to remember, (name of a time, s)... Twice: the job is failed.
even_when_full()
if field('state') == 'failed' then return 1 end
if not owns('plan', ARGV[2]) then return lost end
if field('state') ~= 'validating' then return illegal('failed') end
move('failed')
for place = 4, #ARGV, 2 do call('HSET', key.job, ARGV[place], ARGV[place + 1]) end
forget_job(ARGV[3])
return 1

--@ feed_state
-- id, fingerprint, token, largest window, budget. A job may fill its share of the budget: one of long prompts
-- must not starve the others. Its window is half empty again after 5 to 20 seconds: doubled or halved until it is.
if not owns('feed', ARGV[3]) or field('state') ~= 'in_progress' then return lost end
local other = other_model(ARGV[2])
if other then return other end
local live, room = call('SCARD', key.live), ARGV[5] - (call('GET', key.fed_bytes) or 0)
if live > 0 then
  local share = math.floor(ARGV[5] / math.max(call('SCARD', key.feeding), 1))
  room = math.min(room, share - number('live_bytes'))
end
local size = window(ARGV[4])
if live * 2 > size then
  if field('filled') == '' then call('HSET', key.job, 'filled', now) end
elseif field('filled') ~= '' then
  local took, own = now - number('filled'), math.min(tonumber(ARGV[4]), math.max(number('window'), 128))
  if took < 5000 then own = own * 2 elseif took > 20000 then own = math.ceil(own / 2) end
  call('HSET', key.job, 'window', own)
  call('HDEL', key.job, 'filled')
  size = window(ARGV[4])
end
return {call('LINDEX', key.shards, number('cursor')), number('offset'),
  math.max(0, size - live), math.max(0, room), number('planned')}

--@ feed
-- id, fingerprint, token, shard, offset, last, then (rid, bucket, rows as "1,5", payload)...
-- 0: the cursor is elsewhere. Twice: `fed_call` names the call that moved it last.
-- A request that lives or whose rows are all done is passed over: a plan that was started over, or a
-- recovered job, feeds only what is left.
local requests = (#ARGV - 6) / 4
local this = table.concat({ARGV[3], ARGV[4], ARGV[5], ARGV[6], requests}, '|')
if field('fed_call') == this then return 1 end
if not owns('feed', ARGV[3]) or field('state') ~= 'in_progress' then return lost end
local shard = call('LINDEX', key.shards, number('cursor'))
if shard ~= ARGV[4] or number('offset') ~= tonumber(ARGV[5]) then return 0 end
local other = other_model(ARGV[2])
if other then return other end
local bytes, fed = 0, 0
for place = 7, #ARGV, 4 do
  local rid, bucket, rows, payload = ARGV[place], ARGV[place + 1], ARGV[place + 2], ARGV[place + 3]
  local wanted = false
  for row in string.gmatch(rows, '%d+') do
    wanted = wanted or call('GETBIT', key.done, row) == 0
  end
  if wanted and call('SADD', key.live, rid) == 1 then
    call('HSET', key.requests, rid, payload)
    call('RPUSH', queue[bucket] .. ':' .. field('tenant'), now .. '|' .. rid)
    bytes, fed = bytes + #payload, fed + 1
  end
end
if fed > 0 then join(key.turns, key.given, field('tenant'), field('tenant')) end
call('INCRBY', key.fed_bytes, bytes)
call('HINCRBY', key.job, 'live_bytes', bytes)
call('HINCRBY', key.job, 'fed', fed)
left('unfed', 0 - math.min(requests, number('left_unfed')))
if ARGV[6] == '1' then
  call('HINCRBY', key.job, 'cursor', 1)
  call('HSET', key.job, 'offset', 0)
else
  call('HINCRBY', key.job, 'offset', requests)
end
call('HSET', key.job, 'fed_call', this)
settle()
return 1

--@ finish
-- id, fingerprint, token or '', state, seconds to remember, (field, value)... Twice: the state is terminal.
-- The manifest is the truth: it was there first, whatever this job became since. Who found it needs no token.
even_when_full()
local state = field('state')
if state == '' or terminal[state] then return 1 end
if ARGV[3] ~= '' and not owns('finalize', ARGV[3]) then return lost end
if not terminal[ARGV[4]] then return illegal(ARGV[4]) end
local other = other_model(ARGV[2])
if other then return other end
revoke()
call('HSET', key.job, 'state', ARGV[4])
for place = 6, #ARGV, 2 do call('HSET', key.job, ARGV[place], ARGV[place + 1]) end
forget_job(ARGV[5])
return 1
